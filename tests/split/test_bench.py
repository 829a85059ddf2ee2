"""The price of the split, as `python -m cluster.bench.split` measures it."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cluster.bench import split
from tests.split.arms import Arms, remote, separate_of


def test_a_round_is_its_parts(arms: Arms) -> None:
    told: list[str] = []
    engines = arms.colocated.engine, separate_of(arms.separate)
    price = split.measure(*engines, 1, 4, rounds=1, repeats=2, progress=told.append)
    assert told == ["1 request, repeat 1 of 2", "1 request, repeat 2 of 2"]
    assert (price.requests, price.rounds, price.repeats) == (1, 2, 2)
    # Medians of two rounds are their means, so they add up.
    assert price.target_ms.median + price.propose_ms.median == pytest.approx(price.step_ms.median)
    parts = (price.fuse_ms, price.encode_ms, price.transfer_ms, price.draft_ms, price.decode_ms)
    assert 0 < sum(part.median for part in parts) < price.propose_ms.median
    assert price.transfer_ms.median + price.draft_ms.median == pytest.approx(price.wait_ms.median)
    assert 0 < price.split_share.median < 1
    assert price.request_bytes > price.reply_bytes > 128
    assert price.step_ratio.least <= price.step_ratio.median <= price.step_ratio.greatest
    assert remote(arms.separate).lost is None
    assert json.loads(json.dumps(asdict(price)))["step_ms"]["median"] == price.step_ms.median


def test_what_cannot_be_measured_ends_in_one_line(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(split.main)
    result = CliRunner().invoke(app, ["--target", str(tmp_path / "nowhere"), "--draft", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "there is no such folder" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
