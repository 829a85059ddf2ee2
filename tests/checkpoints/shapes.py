"""Sizes and gains that all tiny families share."""

HIDDEN = 64
TARGET_LAYERS = 4
DRAFT_LAYERS = 2
# 0-based, as DSpark and DFlash checkpoints count: the states that leave these target layers feed the draft.
TARGET_LAYER_IDS = [0, 2, 3]
K = 4  # tokens drafted a round
MAX_POSITIONS = 2048

# Gains of what a layer adds to the residual stream. Quiet: its numbers count, but change no next token of a table.
# Audible: they change none where the table is known, and decide where it isn't.
# Loud: little remains of the token itself, which would otherwise be a head's answer, or let it read a table's answer.
QUIET = 0.05
AUDIBLE = 0.5
LOUD = 3.0
