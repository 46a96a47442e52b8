"""Where a checkpoint's tensors come from: mapped from its files, streamed from disk to a GPU, or drawn there.

The loader asks for the stored parts of a weight by suffix; what a source returns is on the model's device and whole.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from stepfloor.weights.checkpoint import Weight
from stepfloor.weights.headers import Entry

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I64": torch.int64,
}
READERS = 8
CHUNK_BYTES = 16 << 20


class TensorSource(Protocol):
    """What the loader asks for."""

    def parts(self, weight: Weight) -> dict[str, Tensor]:
        """The stored tensors of a weight by suffix."""
        ...

    def stacked(self, weights: Sequence[Weight]) -> dict[str, Tensor]:
        """The stored tensors of weights that have one layout, by suffix, each with a leading axis over the weights."""
        ...


class MappedTensors:
    """Tensors of a CPU model: pages of the file, read when they are used."""

    def parts(self, weight: Weight) -> dict[str, Tensor]:
        """See TensorSource."""
        return {suffix: _mapped(entry) for suffix, entry in weight.parts.items()}

    def stacked(self, weights: Sequence[Weight]) -> dict[str, Tensor]:
        """See TensorSource; a stack is a copy."""
        return {
            suffix: torch.stack([_mapped(weight.parts[suffix]) for weight in weights]) for suffix in weights[0].parts
        }


class StreamedTensors:
    """Tensors read from disk straight into the device's memory, chunks in parallel through pinned buffers.

    on_bytes  called with the number of bytes that have arrived, from several threads
    """

    def __init__(self, device: torch.device, on_bytes: Callable[[int], None] | None = None) -> None:
        self.device = device
        self._on_bytes = on_bytes
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="read")
        self._own = threading.local()

    def close(self) -> None:
        """End the reading threads and give their pinned buffers back."""
        self._pool.shutdown()

    def parts(self, weight: Weight) -> dict[str, Tensor]:
        """See TensorSource."""
        return {suffix: stack[0] for suffix, stack in self.stacked((weight,)).items()}

    def stacked(self, weights: Sequence[Weight]) -> dict[str, Tensor]:
        """See TensorSource."""
        made: dict[str, Tensor] = {}
        waiting: list[Future[None]] = []
        for suffix, entry in weights[0].parts.items():
            made[suffix] = torch.empty((len(weights), *entry.shape), dtype=DTYPES[entry.dtype], device=self.device)
            for i, weight in enumerate(weights):
                waiting += self._read(weight.parts[suffix], made[suffix][i])
        for future in waiting:
            future.result()
        return made

    def read_into(self, entry: Entry, destination: Tensor) -> None:
        """Read one stored tensor into memory of its size, on the device or the host."""
        for future in self._read(entry, destination):
            future.result()

    def _read(self, entry: Entry, destination: Tensor) -> list[Future[None]]:
        flat = destination.reshape(-1).view(torch.uint8)
        # the memory may just have been freed by work that is still queued: copies wait for it, the disk does not
        freed = None
        if destination.is_cuda:
            freed = torch.cuda.Event()
            freed.record(torch.cuda.current_stream(self.device))
        return [
            self._pool.submit(self._chunk, entry.file, entry.offset + at, flat[at : at + CHUNK_BYTES], freed)
            for at in range(0, entry.nbytes, CHUNK_BYTES)
        ]

    @torch.inference_mode()  # the caller's mode does not reach this thread, and its tensors may be of that mode
    def _chunk(self, file: Path, offset: int, destination: Tensor, freed: torch.cuda.Event | None) -> None:
        buffer, stream = self._buffer()
        count = destination.numel()
        staged = buffer[:count] if destination.is_cuda else destination
        view = staged.numpy().data
        with file.open("rb", buffering=0) as source:
            source.seek(offset)
            at = 0
            while at < count:
                got = source.readinto(view[at:])
                if not got:
                    raise OSError(f"{file.name} ended {count - at} bytes early while it was read; fetch it again")
                at += got
        if freed is not None:
            stream.wait_event(freed)
            with torch.cuda.stream(stream):
                destination.copy_(staged, non_blocking=True)
            stream.synchronize()
        if self._on_bytes is not None:
            self._on_bytes(count)

    def _buffer(self) -> tuple[Tensor, torch.cuda.Stream]:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self._own.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        return self._own.buffer, self._own.stream


def _mapped(entry: Entry) -> Tensor:
    return torch.frombuffer(entry.read(), dtype=DTYPES[entry.dtype]).reshape(entry.shape)
