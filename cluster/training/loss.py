"""What a draft is trained for: the target's tokens, its distributions, and to know when it is right.

Shapes: A blocks, K tokens a block, V vocabulary, H hidden.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# An early token counts more, since a wrong one makes all that follow worthless: token i (from 0) weighs DECAY ** i.
DECAY = 0.8
# Of the two losses that train the draft; the confidence head's touches nothing but itself.
CROSS_ENTROPY_WEIGHT = 1.0
DIVERGENCE_WEIGHT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLoss:
    """Of one batch: the loss to minimise, its parts, and the tokens accepted a round, bonus included, were it greedy.

    `acceptance_length` is the mean over blocks of 1 plus the drafts that are right before the first wrong one.
    """

    total: Tensor
    cross_entropy: Tensor
    divergence: Tensor
    confidence: Tensor
    acceptance_length: Tensor


def block_loss(
    *,
    logits: Tensor,
    target_logits: Tensor,
    confidence_logits: Tensor,
    tokens: Tensor,
    valid: Tensor,
    compiled: bool = False,
) -> BlockLoss:
    """The loss of blocks whose logits are [A, K, V], Markov bias included.

    `tokens` [A, K] are the target's own, `target_logits` its logits at the same places, `valid` [A, K] is false beyond
    an answer's end. The distribution loss is KL(target ‖ draft). The confidence head learns the probability that
    rejection sampling accepts the draft's token, the overlap of both distributions (Leviathan et al., 2023, 3.3).
    `compiled` fuses the passes over the vocabulary, which bound the speed on a GPU.
    """
    measure = _compiled_places() if compiled else _places
    surprise, divergence, overlap, best = measure(logits, target_logits, tokens)
    weights = DECAY ** torch.arange(tokens.shape[1], device=tokens.device) * valid
    weights = weights / weights.sum().clamp_min(1.0)
    cross_entropy, divergence = (weights * surprise).sum(), (weights * divergence).sum()
    missed = functional.binary_cross_entropy_with_logits(confidence_logits, overlap, reduction="none")
    confidence = (weights * missed).sum()
    right = ((best == tokens) & valid).cumprod(dim=1)
    return BlockLoss(
        total=CROSS_ENTROPY_WEIGHT * cross_entropy + DIVERGENCE_WEIGHT * divergence + confidence,
        cross_entropy=cross_entropy.detach(),
        divergence=divergence.detach(),
        confidence=confidence.detach(),
        acceptance_length=1.0 + right.sum() / valid[:, 0].sum().clamp_min(1),
    )


def _places(logits: Tensor, target_logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """At each place, [A, K]: surprise at the token, KL(target ‖ draft), overlap, and the draft's best token."""
    ours, theirs = functional.log_softmax(logits.float(), dim=-1), functional.log_softmax(target_logits.float(), dim=-1)
    surprise = -ours.gather(-1, tokens[..., None]).squeeze(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(dim=-1)
    overlap = torch.minimum(ours.detach(), theirs).exp().sum(dim=-1).clamp(0.0, 1.0)
    return surprise, divergence, overlap, logits.detach().argmax(dim=-1)


@functools.cache
def _compiled_places() -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    compiled: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
    compiled = torch.compile(_places, dynamic=False)
    return compiled
