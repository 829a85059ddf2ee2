"""A bench of faults in its short form."""

import json
import subprocess
import sys
from pathlib import Path

from cluster.bench.faults.figures import Figure
from cluster.bench.faults.report import SCHEMA
from tests.checkpoints import make_pair

DEADLINE_S = 900

Rows = dict[str, dict[str, Figure]]
"""The figures of each fault, by their names."""


def run_short(module: str, folder: Path, *options: str) -> Rows:
    """Every row of the bench `python -m module`, on a pair that is written to `folder`. Some bars need an idle machine,
    and may be missed."""
    pair = make_pair("qwen3-dspark-agreeing", folder)
    command = [sys.executable, "-m", module, "--target", str(pair.target), "--draft", str(pair.draft), *options]
    result = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    print(result.stderr, result.stdout)
    assert result.returncode in (0, 1), result.stderr
    report = json.loads(result.stdout)
    assert report["schema"] == SCHEMA
    return {row["fault"]: {each["name"]: Figure(**each) for each in row["figures"]} for row in report["rows"]}


def values(rows: Rows, name: str) -> dict[str, str]:
    """Of the figure of that name, where a fault has one."""
    return {fault: figures[name].value for fault, figures in rows.items() if name in figures}
