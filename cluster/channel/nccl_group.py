"""A communicator of two processes, each with a GPU of its own: with a time-out to meet, and an end by any thread."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

import torch

from cluster.channel import nccl_library
from cluster.channel.errors import ChannelClosed, DeadlineExceeded, PeerDied

END_TIMEOUT_S: Final = 5.0
"""For an aborted communicator to be given back. It takes milliseconds once what is on the streams has ended."""

_WORD_BYTES: Final = 4


class NcclGroup:
    """`send` and `receive` are put on a stream, and wait there for the peer's: they must come in the same order on both
    sides, and with the same lengths. One thread uses them; `abort` is for any."""

    def __init__(self, unique_id: bytes, rank: int, deadline_s: float) -> None:
        """Meet the peer, on the current GPU, and send a word each way: the first transfers set up the connections, and
        wait for it. NCCL has no time-out for either, so a thread does it that may be left behind.

        Raises:
            DeadlineExceeded: the peer didn't come.
            PeerDied: NCCL says why not; its log says more, with NCCL_DEBUG=INFO.
        """
        self._device = torch.cuda.current_device()
        self._peer = 1 - rank
        self._lock = threading.Lock()
        self._communicator: int | None = None
        """Once no other thread is in a call of it."""
        self._is_aborted = False
        self._ending: threading.Thread | None = None
        self._words = torch.zeros(2, dtype=torch.int32, device=self._device)  # lives as long as a transfer may
        torch.cuda.current_stream().synchronize()
        outcome: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        threading.Thread(
            target=self._meet, args=(unique_id, rank, outcome), name="dspark-nccl-meet", daemon=True
        ).start()
        try:
            failure = outcome.get(timeout=min(max(deadline_s - time.monotonic(), 0.0), threading.TIMEOUT_MAX))
        except queue.Empty:
            self.abort()
            raise DeadlineExceeded("the peer didn't join the NCCL group") from None
        if failure is not None:
            self.abort()
            raise PeerDied(f"the NCCL group didn't form: {failure}")

    def send(self, address: int, num_bytes: int, stream: int) -> None:
        """Raises ChannelClosed where the group has ended."""
        self._put(nccl_library.send, address, num_bytes, stream)

    def receive(self, address: int, num_bytes: int, stream: int) -> None:
        """As `send`."""
        self._put(nccl_library.receive, address, num_bytes, stream)

    def abort(self) -> None:
        """What is on its way ends, here, within milliseconds; it may have come in part. Returns at once."""
        with self._lock:
            if self._is_aborted:
                return
            self._is_aborted = True
            if self._communicator is None:
                return  # the thread that still waits for the peer will do it
            # It waits until the streams have passed the transfers, and some may be behind other work.
            self._ending = threading.Thread(target=self._end, args=(self._communicator,), name="dspark-nccl-end")
            self._ending.daemon = True
            self._ending.start()

    def close(self) -> bool:
        """Abort, and wait for it. Returns whether it has ended: then no transfer touches memory any more."""
        self.abort()
        if self._ending is not None:
            self._ending.join(END_TIMEOUT_S)
        return self._ending is None or not self._ending.is_alive()

    def _put(self, transfer: Callable[[int, int, int, int, int], None], address: int, length: int, stream: int) -> None:
        with self._lock:
            if self._is_aborted:
                raise ChannelClosed("the NCCL group was aborted")
            assert self._communicator is not None
            try:
                transfer(self._communicator, address, length, self._peer, stream)
            except RuntimeError as error:
                raise ChannelClosed(str(error)) from error

    def _meet(self, unique_id: bytes, rank: int, outcome: "queue.SimpleQueue[RuntimeError | None]") -> None:
        try:
            torch.cuda.set_device(self._device)  # each thread has its own
            stream = torch.cuda.Stream()
            communicator = nccl_library.join(unique_id, rank)
            transfers = [nccl_library.send, nccl_library.receive]
            try:
                for transfer, word in zip(transfers if rank == 0 else reversed(transfers), self._words, strict=True):
                    transfer(communicator, word.data_ptr(), _WORD_BYTES, self._peer, stream.cuda_stream)
            finally:
                with self._lock:
                    self._communicator = communicator
                    is_late = self._is_aborted
                if is_late:
                    nccl_library.abort(communicator)
            if not is_late:
                stream.synchronize()
        except RuntimeError as error:
            outcome.put(error)
        else:
            outcome.put(None)

    def _end(self, communicator: int) -> None:
        torch.cuda.set_device(self._device)  # or NCCL would make a context on the first GPU
        nccl_library.abort(communicator)
