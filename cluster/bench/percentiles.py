"""Percentiles, and the spread of a few repeats."""

import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated between the two values beside it, as numpy does it."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median_absolute_deviation(values: Sequence[float]) -> float:
    """The median distance from the median."""
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)
