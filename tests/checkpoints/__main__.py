"""`python -m tests.checkpoints NAME FOLDER`: write a tiny pair, for a command that wants a target and a draft."""

import sys
from pathlib import Path

from tests.checkpoints import PAIRS, make_pair

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in PAIRS:
        sys.exit(f"usage: python -m tests.checkpoints {{{','.join(PAIRS)}}} FOLDER")
    pair = make_pair(sys.argv[1], Path(sys.argv[2]))
    print(f"--target {pair.target} --draft {pair.draft}")
