"""What DSpark drafts of every family have: configuration keys, a Markov head and a confidence head."""

from tests.checkpoints.folder import Config, Weights
from tests.checkpoints.shapes import HIDDEN, TARGET_LAYER_IDS, TARGET_LAYERS, K
from tests.checkpoints.successor import SuccessorTable, head_rows
from tests.checkpoints.vocabulary import MASK_ID, VOCAB_SIZE

MARKOV_RANK = HIDDEN

# What the Markov head adds for a token it knows, relative to the draft's own logits: too much for these to win.
_MARKOV_GAIN = 2.0


def dspark_keys() -> Config:
    return {
        "tie_word_embeddings": False,
        "block_size": K,
        "num_target_layers": TARGET_LAYERS,
        "target_layer_ids": TARGET_LAYER_IDS,
        "mask_token_id": MASK_ID,
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def add_dspark_heads(weights: Weights, table: SuccessorTable | None) -> None:
    """A random confidence head, and a Markov head: random, or one that knows `table`.

    For a blind token it adds nothing: the draft then proposes what its layers say, which depends on the whole context.
    """
    weights.normal("markov_head.markov_w1.weight", VOCAB_SIZE, MARKOV_RANK)
    weights.linear("markov_head.markov_w2.weight", VOCAB_SIZE, MARKOV_RANK)
    if table is not None:
        weights.put("markov_head.markov_w1.weight", table.known_codes)
        weights.put("markov_head.markov_w2.weight", _MARKOV_GAIN * head_rows(table.codes, table.successor))
    weights.linear("confidence_head.proj.weight", 1, HIDDEN + MARKOV_RANK)
    weights.normal("confidence_head.proj.bias", 1)
