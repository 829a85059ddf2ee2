"""What a draft's process loads of the target's checkpoint."""

from pathlib import Path

import pytest

from cluster.speculation.checkpoint import borrowed_parts
from tests.checkpoints import make_pair


@pytest.mark.parametrize(
    ("name", "borrowed"),
    [
        ("qwen3-dspark", {"embed_tokens", "lm_head"}),
        ("qwen3-dflash-agreeing", {"embed_tokens"}),
        ("qwen3-eagle3", {"embed_tokens"}),
        ("qwen3-draft-model", set()),
    ],
)
def test_a_draft_borrows_what_its_checkpoint_lacks(name: str, borrowed: set[str], tmp_path: Path) -> None:
    assert borrowed_parts(make_pair(name, tmp_path).draft) == borrowed
