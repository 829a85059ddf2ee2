"""Where files that are made once live: `DSPARK_CACHE`, or `~/.cache/dspark-cluster`."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder; it may not exist yet."""
    return Path(os.environ.get("DSPARK_CACHE") or Path.home() / ".cache" / "dspark-cluster").expanduser()
