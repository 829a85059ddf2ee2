"""Which tests stay together when pytest-xdist runs them in several processes: those that share what starts slowly."""

import re
from typing import Final

from xdist.scheduler import LoadScopeScheduling

_ONE_GROUP: Final = ("tests/cluster", "tests/serving")
"""Folders of one Ray cluster, or one engine."""
_BY_PAIR: Final = ("tests/colocated/test_exactness.py", "tests/split/test_rounds.py", "tests/split/test_bench.py")
"""Their engines are those of a pair, which is the first parameter of a test."""


class GroupScheduling(LoadScopeScheduling):
    """A group runs in one process, in its order; groups start in the order of the files."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    module = nodeid.partition("::")[0]
    folder = module.rpartition("/")[0]
    if folder in _ONE_GROUP:
        return folder
    if module in _BY_PAIR and (pair := re.search(r"\[([a-z0-9-]+?)(-\d+)?\]", nodeid)):
        return f"{folder} {pair[1]}"
    return module
