"""Where a checkpoint's tensors come from: mapped from its files, streamed from disk to a GPU, or drawn there.

The loader asks for the stored parts of a weight by suffix; what a source returns is on the model's device and whole.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import RawIOBase
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
AHEAD_BYTES = 512 << 20  # of a file, asked of the system behind what is read
GAP_BYTES = 64 << 10  # between two tensors, which costs less to read than a read more


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
        self._asked: dict[Path, int] = {}  # how far the system has been asked to read each file
        self._asking = threading.Lock()

    def close(self) -> None:
        """End the reading threads and give their pinned buffers back."""
        self._pool.shutdown()

    def parts(self, weight: Weight) -> dict[str, Tensor]:
        """See TensorSource."""
        return {suffix: stack[0] for suffix, stack in self.stacked((weight,)).items()}

    def stacked(self, weights: Sequence[Weight]) -> dict[str, Tensor]:
        """See TensorSource."""
        made: dict[str, Tensor] = {}
        wanted: list[tuple[Entry, Tensor]] = []
        for suffix, entry in weights[0].parts.items():
            made[suffix] = torch.empty((len(weights), *entry.shape), dtype=DTYPES[entry.dtype], device=self.device)
            wanted += [(weight.parts[suffix], made[suffix][i]) for i, weight in enumerate(weights)]
        self._read(wanted)
        return made

    def read_into(self, entry: Entry, destination: Tensor) -> None:
        """Read one stored tensor into memory of its size, on the device or the host."""
        self._read([(entry, destination)])

    def _read(self, wanted: Sequence[tuple[Entry, Tensor]]) -> None:
        """Read tensors, all of them on the device or all on the host."""
        # the memory may just have been freed by work that is still queued: copies wait for it, the disk does not
        freed = None
        if wanted[0][1].is_cuda:
            freed = torch.cuda.Event()
            freed.record(torch.cuda.current_stream(self.device))
        for future in [self._pool.submit(self._fetch, span, freed) for span in spans(wanted)]:
            future.result()

    @torch.inference_mode()  # the caller's mode does not reach this thread, and its tensors may be of that mode
    def _fetch(self, span: "Span", freed: torch.cuda.Event | None) -> None:
        with span.file.open("rb", buffering=0) as source:
            if freed is None:
                for at, destination in span.parts:
                    source.seek(span.offset + at)
                    _fill(source, destination.numpy().data)
            else:
                buffer, stream = self._buffer()
                self._read_ahead(source.fileno(), span)
                source.seek(span.offset)
                _fill(source, buffer[: span.nbytes].numpy().data)
                stream.wait_event(freed)
                with torch.cuda.stream(stream):
                    for at, destination in span.parts:
                        destination.copy_(buffer[at : at + destination.numel()], non_blocking=True)
                stream.synchronize()
        if self._on_bytes is not None:
            self._on_bytes(sum(destination.numel() for _, destination in span.parts))

    def _read_ahead(self, descriptor: int, span: "Span") -> None:
        """Let the system read on: the disk then works while the loader arranges what it has got."""
        end = span.offset + span.nbytes
        with self._asking:
            begin = max(end, self._asked.get(span.file, 0))
            if not hasattr(os, "posix_fadvise") or begin - end > AHEAD_BYTES // 2:
                return
            self._asked[span.file] = end + AHEAD_BYTES
        os.posix_fadvise(descriptor, begin, end + AHEAD_BYTES - begin, os.POSIX_FADV_WILLNEED)

    def _buffer(self) -> tuple[Tensor, torch.cuda.Stream]:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self._own.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        return self._own.buffer, self._own.stream


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbours in a file that are read at once, gaps between them included: nbytes from offset on.

    parts  where in the span the bytes of each piece begin, and the flat uint8 memory they go to
    """

    file: Path
    offset: int
    nbytes: int
    parts: tuple[tuple[int, Tensor], ...]


def spans(wanted: Sequence[tuple[Entry, Tensor]]) -> list[Span]:
    """Stored tensors in the order of their bytes, as spans of CHUNK_BYTES at most.

    Files keep tensors of one type together, so the scalars of 512 experts lie a few bytes apart: read one by one, four
    bytes of them cost what a megabyte of codes costs.
    """
    pieces = sorted(
        (
            (entry.file, entry.offset + at, flat[at : at + CHUNK_BYTES])
            for entry, flat in ((entry, destination.reshape(-1).view(torch.uint8)) for entry, destination in wanted)
            for at in range(0, entry.nbytes, CHUNK_BYTES)
        ),
        key=lambda piece: piece[:2],
    )
    found: list[Span] = []
    parts: list[tuple[int, Tensor]] = []
    begin = 0
    for number, (file, offset, flat) in enumerate(pieces):
        begin = begin if parts else offset
        parts.append((offset - begin, flat))
        end = offset + flat.numel()
        following = pieces[number + 1] if number + 1 < len(pieces) else None
        if following is None or not (
            following[0] == file
            and following[1] - end <= GAP_BYTES
            and following[1] + following[2].numel() - begin <= CHUNK_BYTES
        ):
            found.append(Span(file, begin, end - begin, tuple(parts)))
            parts = []
    return found


def _fill(source: RawIOBase, wanted: memoryview) -> None:
    """Read exactly so many bytes. Raises OSError where the file ends before."""
    at = 0
    while at < len(wanted):
        got = source.readinto(wanted[at:])
        if not got:
            name = Path(str(getattr(source, "name", "the file"))).name
            raise OSError(f"{name} ended {len(wanted) - at} bytes early while it was read; fetch it again")
        at += got


def _mapped(entry: Entry) -> Tensor:
    return torch.frombuffer(entry.read(), dtype=DTYPES[entry.dtype]).reshape(entry.shape)
