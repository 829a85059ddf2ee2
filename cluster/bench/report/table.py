"""A sweep's cells as CSV: a line each, median and MAD of each figure in a column each."""

import csv
import io
from collections.abc import Mapping
from typing import Any


def csv_table(whole: Mapping[str, Any]) -> str:
    """What a cell doesn't have is empty."""
    cells = whole["cells"]
    figures = list(dict.fromkeys(name for cell in cells for name in cell["figures"]))
    settings = list(dict.fromkeys(key for cell in cells for key in cell["settings"]))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    spreads = [f"{name}{suffix}" for name in figures for suffix in ("", "_mad")]
    fixed = ["arm", "concurrency", "request_rate", "status", "repeats"]
    of_drafts = ["acceptance_length", "acceptance_rate", "synthetic_acceptance_length"]
    writer.writerow([*fixed, *settings, *of_drafts, *spreads])
    for cell in cells:
        acceptance = cell["acceptance"] or {}
        blank: dict[str, Any] = {"median": None, "mad": None}
        values = [cell["figures"].get(name, blank)[part] for name in figures for part in ("median", "mad")]
        own = [cell["settings"].get(key) for key in settings]
        accepted = [*(acceptance.get(name) for name in of_drafts[:2]), cell[of_drafts[2]]]
        writer.writerow([*(cell[name] for name in fixed), *own, *accepted, *values])
    return text.getvalue()
