"""The target's part of the handshake: from an address to a draft that serves rounds."""

import time
from collections.abc import Sequence
from typing import Any, Final

from cluster.channel import ChannelError, offer_channel
from cluster.speculation import control
from cluster.speculation.control import HandshakeError
from cluster.speculation.handshake import Allocated, EngineSizes, PoolSizes, RoundsOpen
from cluster.speculation.messages import (
    BlockTableSizes,
    MessageCodec,
    RoundSizes,
    max_reply_bytes,
    max_request_bytes,
)
from cluster.speculation.rounds import DraftClient
from cluster.speculation.settings import RemoteDraftSettings

START_TIMEOUT_S: Final = 300.0
"""For the draft's process to import vLLM and load its weights; a first import on a fresh machine takes a minute."""

OPEN_TIMEOUT_S: Final = 30.0
"""For a process that is ready to open a channel."""

FIRST_EPOCH: Final = 1


class Pairing:
    """The target's end of the control line to a draft's process."""

    def __init__(self, settings: RemoteDraftSettings, engine: EngineSizes) -> None:
        self._settings = settings
        self._line = control.connect(settings.address)
        self._line.send(engine)

    def open_rounds(self, pool: PoolSizes, sizes: dict[str, Any]) -> tuple[DraftClient, Sequence[int]]:
        """Let the draft allocate, and open the channel. Also returns the target's groups that it follows.

        `sizes` are the fields of RoundSizes but for `block_tables`, which depend on the draft's answer.

        Raises:
            HandshakeError: the draft's process has ended or refuses; nothing is allocated then.
        """
        self._line.send(pool)
        allocated = self._line.receive(Allocated, timeout_s=START_TIMEOUT_S)
        tables = tuple(
            BlockTableSizes(width=group.table_width, block_size=group.block_size, num_blocks=pool.num_blocks)
            for group in (pool.groups[index] for index in allocated.tables)
        )
        round_sizes = RoundSizes(block_tables=tables, **sizes)
        offer = offer_channel(
            self._settings.channel,
            max_send_bytes=max_request_bytes(round_sizes),
            max_receive_bytes=max_reply_bytes(round_sizes),
        )
        self._line.send(RoundsOpen(sizes=round_sizes, digest=pool.digest, channel=offer.address, epoch=FIRST_EPOCH))
        try:
            channel = offer.accept(time.monotonic() + OPEN_TIMEOUT_S)
        except ChannelError as error:
            raise HandshakeError(
                "the draft's side can't be paired",
                f"it did not open the {offer.address.kind} channel ({error})",
                "look at what the draft's process wrote last",
            ) from error
        codec = MessageCodec(round_sizes, pool.digest)
        client = DraftClient(channel, codec, epoch=FIRST_EPOCH, deadline_s=self._settings.round_deadline_s)
        return client, allocated.tables

    def close(self) -> None:
        """Let go of the draft."""
        self._line.close()
