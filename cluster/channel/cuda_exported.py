"""As `exported`, of a GPU's memory: the allocation in which a process's tensor lies, opened in another one of the host.

CUDA exports what cudaMalloc or cuMemAlloc gave, and that whole. torch's allocator cuts tensors out of such, so all that
a peer is told of a place is counted from the allocation's beginning.
"""

import torch

from cluster.channel import cuda_driver
from cluster.channel.errors import ChannelUnavailable


class ExportedAllocation:
    """That of a tensor of this process, which has to outlive its readers; `location` is for the peer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """
        Raises:
            ChannelUnavailable: CUDA gives no handle of it.
        """
        try:
            self.address, self.num_bytes = cuda_driver.allocation_of(tensor.data_ptr())
            self.location = cuda_driver.export(self.address).hex()
        except RuntimeError as error:
            raise ChannelUnavailable(
                "the target's KV pool",
                f"CUDA exports no handle of it: {error}",
                "set PYTORCH_ALLOC_CONF=expandable_segments:False, or use the shm channel: the draft then keeps a copy",
            ) from error

    def close(self) -> None:
        """The memory is torch's, which frees it."""


def map_allocation(location: str, num_bytes: int, device: torch.device) -> torch.Tensor:
    """The peer's allocation as bytes on `device`, this process's GPU, though it may lie on another one that this one
    reaches. To read only, which CUDA doesn't enforce. It stays until the process ends: captured graphs have its
    addresses in them.

    Raises:
        ChannelUnavailable: it can't be opened.
    """
    try:
        address = cuda_driver.open_exported(bytes.fromhex(location))
    except (RuntimeError, ValueError) as error:
        raise ChannelUnavailable(
            "the target's KV pool", f"it can't be opened: {error}", "use the shm channel: the draft then keeps a copy"
        ) from error
    return tensor_at(address, num_bytes, device)


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Bytes that torch neither owns nor asks the driver about: it would say on which GPU they really are."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))
