"""Host memory that a GPU reads by its address, no larger than what lies in it.

`Tensor.pin_memory` takes blocks whose size is a power of two: of 11.92 GiB of a table a process grew by 15.99, which no
memory plan knows. Whole pages are registered with the driver here instead.
"""

import mmap
import weakref

import torch
from torch import Tensor

from stepfloor.errors import UserError


def pinned_copy(tensor: Tensor) -> Tensor:
    """The same values in page-locked memory of the host, which is given back with the last reference to it.

    tensor  not empty, on the host or on a device
    Raises UserError where the system does not lock that much.
    """
    pages = mmap.mmap(-1, tensor.nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer pages to lock
        pages.madvise(mmap.MADV_HUGEPAGE)
    copy = torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)
    address = copy.data_ptr()
    failed = _register(address, copy.nbytes)
    if failed:
        raise UserError(
            f"{copy.nbytes / 2**20:.0f} MiB more of the n-gram table could not be locked in the host's memory (CUDA "
            f"error {failed}); free memory there, or raise what this process may lock, or pass --ngram-table device"
        )
    weakref.finalize(pages, _unregister, address).atexit = False  # the driver ends with the process
    return copy.copy_(tensor)


def _register(address: int, nbytes: int) -> int:
    """Of the driver's error codes; 0 is success."""
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # pyrefly: ignore[missing-attribute]


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # pyrefly: ignore[missing-attribute]
