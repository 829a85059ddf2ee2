"""The report says what `results.json` has, needs nothing else, and a browser has nothing to say against it."""

import csv
import io
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster.bench.report.page import page
from cluster.bench.report.svg import Scale, shown, tick_step
from cluster.bench.report.table import csv_table
from tests.unit.bench.report_page import Page, assert_shows
from tests.unit.bench.sample import sample

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return sample()


def test_figures_are_those_of_the_json(whole: dict[str, Any]) -> None:
    assert_shows(page(whole), whole)


def test_it_needs_nothing_else_and_nothing_in_it_is_taken_for_html(whole: dict[str, Any]) -> None:
    text = page(whole)
    assert "script" not in Page(text).tags
    assert "UNAVAILABLE: &lt;gone&gt;" in text
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    assert "url(" not in text


def test_findings_are_the_comparisons_and_what_cannot_be_compared(whole: dict[str, Any]) -> None:
    text = page(whole)
    assert whole["comparisons"]
    for each in whole["comparisons"]:
        assert each["sentence"] in text
    assert "separate loses to colocated at concurrency 1 by" in text
    status = {cell["name"]: cell["status"] for cell in whole["cells"]}
    assert status["plain, concurrency 32"] == "failed"
    assert status["separate, concurrency 32"] == "unstable"
    assert not any(each["load"] == "concurrency 32" for each in whole["comparisons"])


def test_acceptance_of_random_tokens_is_not_quoted() -> None:
    text = page(sample("random"))
    assert "acceptance on them says nothing" in text
    assert ".acceptance_length" not in text


def test_synthetic_acceptance_is_said_and_not_quoted() -> None:
    whole = sample("random", "model.load_format=dummy", "model.synthetic_acceptance_length=5.5")
    text = page(whole)
    assert_shows(text, whole)
    assert "Acceptance is synthetic" in text
    assert "random weights" in text
    assert ".acceptance_length" not in text
    lengths = [row["synthetic_acceptance_length"] for row in csv.DictReader(io.StringIO(csv_table(whole)))]
    assert lengths == [""] * 3 + ["5.5"] * 6


def test_csv_has_a_line_for_each_cell(whole: dict[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_table(whole))))
    assert [(row["arm"], row["concurrency"]) for row in rows] == [
        (cell["arm"], str(cell["concurrency"])) for cell in whole["cells"]
    ]
    separate = rows[6]
    assert float(separate["output_throughput"]) == whole["cells"][6]["figures"]["output_throughput"]["median"]
    assert float(separate["output_throughput_mad"]) == whole["cells"][6]["figures"]["output_throughput"]["mad"]


@pytest.mark.parametrize(
    ("most", "step"), [(0.9, 0.2), (1.0, 0.2), (7.0, 2.0), (12.0, 2.0), (100.0, 20.0), (4321.0, 1000.0)]
)
def test_ticks_are_round(most: float, step: float) -> None:
    assert tick_step(most) == pytest.approx(step)
    scale = Scale.over([most], 0, 100)
    assert scale.most >= most
    assert 3 <= len(scale.ticks) <= 7


def test_numbers_for_people() -> None:
    figures = [shown(value) for value in (0.0, 0.00012, 0.0034, 0.5, 3.14159, 31.4159, 31415.9, 16, -2.5)]
    assert figures == ["0", "1.2e-04", "0.0034", "0.50", "3.14", "31.4", "31,416", "16", "-2.50"]


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
def test_a_browser_shows_it_without_a_word(whole: dict[str, Any], tmp_path: Path) -> None:
    assert BROWSER is not None
    file = tmp_path / "report.html"
    file.write_text(page(whole), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom", file.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert not [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    assert_shows(run.stdout, whole)
