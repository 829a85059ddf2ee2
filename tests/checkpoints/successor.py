"""Pairs that agree by construction: the next token is a function of the last one.

A target whose layers add almost nothing, and whose head is its embedding with permuted rows, follows a successor table.
A draft that holds the same table is right, except at the table's blind tokens, of which it knows nothing. So rounds of
every accepted length occur.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from tests.checkpoints.shapes import HIDDEN, K
from tests.checkpoints.vocabulary import VOCAB_SIZE, printable_ids

# Every blind token of a cycle is at most so many tokens after the one before: rounds of 0 to K are then all frequent.
_LONGEST_STRIDE = 2 * K + 1


@dataclass(frozen=True)
class SuccessorTable:
    """`codes[t]`, float32[V, HIDDEN], embeds token t, and `successor[t]`, int64[V], follows it.

    The draft doesn't know the codes where `blind`, bool[V], is set. Text repeats every `period` tokens.
    """

    codes: torch.Tensor
    successor: torch.Tensor
    blind: torch.Tensor
    period: int

    @property
    def known_codes(self) -> torch.Tensor:
        """The codes, zero for blind tokens."""
        return self.codes.masked_fill(self.blind[:, None], 0.0)


def successor_table(seed: int, period: int | None = None) -> SuccessorTable:
    """Printable tokens in random cycles of `period` (one cycle of all, if None); every other token leads into one."""
    generator = torch.Generator().manual_seed(seed)
    # Of equal length, so that no long code outdoes the right one.
    codes = HIDDEN**0.5 * normalize(torch.randn(VOCAB_SIZE, HIDDEN, generator=generator))
    printable = torch.tensor(printable_ids())
    printable = printable[torch.randperm(len(printable), generator=generator)]
    period = period or len(printable)
    cycles = printable[: len(printable) // period * period].view(-1, period)
    # Spread evenly, so that few tokens have two predecessors: a head's row must tell them from all other tokens.
    successor = cycles.flatten()[torch.arange(VOCAB_SIZE) % cycles.numel()]
    successor[cycles] = cycles.roll(-1, dims=1)
    strides = torch.randint(1, _LONGEST_STRIDE + 1, (cycles.numel(),), generator=generator).cumsum(0)
    blind = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    blind[cycles.flatten()[strides[strides < cycles.numel()]]] = True
    return SuccessorTable(codes, successor, blind, period)


def head_rows(codes: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """The head, float32[V, H], that answers a state near `codes[t]` with token `answers[t]`, by a logit of about √H."""
    return torch.zeros_like(codes).index_add_(0, answers, codes) / codes.shape[1] ** 0.5
