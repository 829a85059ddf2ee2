"""What goes beside a round whose tensors are in device memory: the part of it that the target's CPU knows.

The device's part lies in one buffer, each tensor where `request_layout` has it in a request of as many requests and
tokens: so a channel that copies the buffer copies what the round has, and no more.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cluster.speculation.messages.errors import MessageError
from cluster.speculation.messages.header import Header, Kind
from cluster.speculation.messages.layout import Layout
from cluster.speculation.messages.reply import reply_section
from cluster.speculation.messages.request import (
    check_starts,
    is_decode_graph_eligible,
    request_flags,
    request_layout,
)
from cluster.speculation.messages.sizes import RoundSizes

_ON_THE_HOST: Final = ("query_start_loc", "num_scheduled_tokens", "seq_lens_cpu_upper_bound")
_ON_THE_HOST_ALONE: Final = _ON_THE_HOST[1:]

_WORD_BYTES: Final = 4
_LENGTHS_KEPT: Final = 256


@dataclass(slots=True, kw_only=True, eq=False)
class RoundNotice:
    """As the fields of `ProposeRequest`."""

    epoch: int
    step: int
    num_tokens: int
    num_speculative_tokens: int
    decode_graph_eligible: bool
    query_start_loc: NDArray[np.int32]
    num_scheduled_tokens: NDArray[np.int32]
    seq_lens_cpu_upper_bound: NDArray[np.int32]

    @property
    def num_reqs(self) -> int:
        return len(self.num_scheduled_tokens)


def notice_layout(sizes: RoundSizes, num_reqs: int, num_tokens: int) -> Layout:
    sections = {section.tensor.name: section for section in request_layout(sizes, num_reqs, num_tokens).sections}
    return Layout.of(sections[name].tensor for name in _ON_THE_HOST)


def max_notice_bytes(sizes: RoundSizes) -> int:
    return notice_layout(sizes, sizes.max_num_reqs, sizes.max_num_batched_tokens).num_bytes


def notice_header(sizes: RoundSizes, notice: RoundNotice) -> Header:
    return Header(
        kind=Kind.ROUND_NOTICE,
        epoch=notice.epoch,
        step=notice.step,
        num_reqs=notice.num_reqs,
        num_tokens=notice.num_tokens,
        num_speculative_tokens=notice.num_speculative_tokens,
        flags=request_flags(sizes, notice.decode_graph_eligible),
    )


def notice_arrays(notice: RoundNotice) -> list[NDArray[Any]]:
    return [getattr(notice, name) for name in _ON_THE_HOST]


def notice_from(header: Header, arrays: list[NDArray[Any]]) -> RoundNotice:
    check_starts(arrays[0], header.num_tokens)
    return RoundNotice(
        epoch=header.epoch,
        step=header.step,
        num_tokens=header.num_tokens,
        num_speculative_tokens=header.num_speculative_tokens,
        decode_graph_eligible=is_decode_graph_eligible(header.flags),
        **dict(zip(_ON_THE_HOST, arrays, strict=True)),
    )


class DeviceLayout:
    """The device's part of the rounds of one pair: the `tensors` of the largest one; `of(B, T)`, where those of a round
    are, and how many bytes of the buffer it has; and `reply(B)`, where its drafts are in the buffer of replies."""

    def __init__(self, sizes: RoundSizes) -> None:
        """
        Raises:
            MessageError: a row isn't whole 4-byte words, in which the kernels copy.
        """
        self._sizes = sizes
        largest = self._on_the_device(sizes.max_num_reqs, sizes.max_num_batched_tokens)
        self.tensors = tuple(section.tensor for section in largest.sections)
        for row in self._on_the_device(1, 1).sections:
            if row.num_bytes % _WORD_BYTES:
                raise MessageError(f"a row of {row.tensor.name} has {row.num_bytes} bytes, not whole words of 4")
        self.of = lru_cache(_LENGTHS_KEPT)(self._on_the_device)
        self.reply = lru_cache(_LENGTHS_KEPT)(partial(reply_section, sizes))

    def _on_the_device(self, num_reqs: int, num_tokens: int) -> Layout:
        layout = request_layout(self._sizes, num_reqs, num_tokens)
        sections = tuple(section for section in layout.sections if section.tensor.name not in _ON_THE_HOST_ALONE)
        return Layout(sections, layout.num_bytes)
