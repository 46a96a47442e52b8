"""A conversion cut into pieces small enough for a cache: read rows, quantize them, say where each part's bytes go.

A piece depends on its rows and on the scale of its whole tensor, on nothing else, so pieces may be made in any order,
on any number of threads, and again after an interruption: the bytes are the same.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from stepfloor.formats.codec import E4M3_MAX, PackedWeight, quantize, unpack_e4m3
from stepfloor.formats.table import DTYPE_BYTES
from stepfloor.weights.conversions import Matrix, NewFile, Plan, Rows

# 256 KB in float32: what is made of it stays in a core's cache. On a busy 2-core EPYC 1,460 MB/s of bf16 to FP8 against
# 450 in pieces of 1 MB, NVFP4 the same; sixteen threads peak 116 MB beyond torch, in pieces of 1 MB 324.
PIECE_VALUES = 1 << 16
# a unit is what is done and recorded at once
UNIT_BYTES = 32 << 20
_BLOCK_ROWS = 128  # of the formats with square blocks
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows first..stop of a matrix to convert, or a run of bytes to copy."""

    matrix: Matrix | None
    first: int
    stop: int
    source: Path
    source_offset: int = 0
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes read."""
        rows = self.stop - self.first
        return rows if self.matrix is None else rows * self.matrix.rows.row_bytes


class SourceFiles:
    """Files of the source, each opened once for all threads. Read with pread, so nothing of them stays mapped."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> "SourceFiles":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def descriptor(self, path: Path) -> int:
        if path not in self._open:
            opened = os.open(path, os.O_RDONLY)
            # two threads may come here at once; the second one's is not needed
            if self._open.setdefault(path, opened) != opened:
                os.close(opened)
        return self._open[path]

    def read(self, path: Path, offset: int, count: int) -> bytearray:
        """Exactly `count` bytes. Raises RuntimeError where the file ends before them: the census saw them."""
        buffer = bytearray(count)
        view, done = memoryview(buffer), 0
        while done < count:
            got = os.preadv(self.descriptor(path), [view[done:]], offset + done)
            if got == 0:
                raise RuntimeError(f"{path.name} ended at byte {offset + done}; it was longer when it was counted")
            done += got
        return buffer

    def expect(self, path: Path, offset: int, count: int) -> None:
        """Let the system read ahead what a unit is about to ask for piece by piece."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor(path), offset, count, os.POSIX_FADV_WILLNEED)

    def rows(self, rows: Rows, first: int, stop: int) -> Tensor:
        """Rows of a matrix in float32, [stop - first, k]."""
        raw = self.read(rows.file, rows.offset + first * rows.row_bytes, (stop - first) * rows.row_bytes)
        stored = torch.frombuffer(raw, dtype=_DTYPES[rows.dtype]).view(stop - first, rows.k)
        if rows.scale is None:
            return stored.float()
        return unpack_e4m3(stored).mul_(self.table_scale(rows))

    def table_scale(self, rows: Rows) -> float:
        """The one scale of FP8 rows."""
        if rows.scale is None:
            raise ValueError("rows without a scale have none to read")
        raw = self.read(rows.scale.file, rows.scale.offset, rows.scale.nbytes)
        return float(torch.frombuffer(raw, dtype=_DTYPES[rows.scale.dtype]).float())


def units_of(file: NewFile) -> list[Unit]:
    """The work of one file, matrices first. A matrix is cut at multiples of 128 rows."""
    units: list[Unit] = []
    for matrix in file.matrices:
        rows = matrix.rows
        step = max(UNIT_BYTES // rows.row_bytes // _BLOCK_ROWS, 1) * _BLOCK_ROWS
        for first in range(0, rows.n, step):
            units.append(Unit(matrix, first, min(first + step, rows.n), rows.file))
    for copied in file.copies:
        entry = copied.entry
        for first in range(0, entry.nbytes, UNIT_BYTES):
            stop = min(first + UNIT_BYTES, entry.nbytes)
            units.append(Unit(None, first, stop, entry.file, entry.offset + first, copied.offset + first))
    return units


def pieces(matrix: Matrix, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """(first, stop) of runs of rows that are quantized at once."""
    whole = _BLOCK_ROWS if matrix.format == "fp8_block" else 1
    step = max(PIECE_VALUES // matrix.rows.k // whole, 1) * whole
    for start in range(first, stop, step):
        yield start, min(start + step, stop)


def tensor_scales(plan: Plan, sources: SourceFiles, pool: Executor) -> dict[str, Tensor]:
    """The scales that whole tensors share, by canonical name: NVFP4's, and of a table the one of all its shards.

    An FP8 table was scaled so that its largest value is 448 times its scale; others are read once for their largest.
    """
    largest: dict[str, list[float]] = {}
    waiting: dict[str, list[tuple[Matrix, int, int]]] = {}
    for file in plan.files:
        for unit in units_of(file):
            matrix = unit.matrix
            if matrix is None or matrix.format != "nvfp4":
                continue
            key = matrix.shared or matrix.name
            if matrix.rows.scale is not None:
                largest[key] = [E4M3_MAX * sources.table_scale(matrix.rows)]
            else:
                waiting.setdefault(key, []).append((matrix, unit.first, unit.stop))

    def amax(run: tuple[Matrix, int, int]) -> float:
        matrix, first, stop = run
        return max(float(sources.rows(matrix.rows, a, b).abs().max()) for a, b in pieces(matrix, first, stop))

    for key, runs in waiting.items():
        largest[key] = list(pool.map(amax, runs))
    return {key: torch.tensor(max(values) / (6.0 * E4M3_MAX) or 1.0) for key, values in largest.items()}


def convert_piece(
    matrix: Matrix, first: int, stop: int, sources: SourceFiles, scales: dict[str, Tensor]
) -> tuple[Tensor, PackedWeight]:
    """Rows in float32 and what they become."""
    values = sources.rows(matrix.rows, first, stop)
    return values, quantize(values, matrix.format, scales.get(matrix.shared or matrix.name))


def parts_of(matrix: Matrix, packed: PackedWeight, first: int) -> Iterator[tuple[str, int, Tensor]]:
    """(suffix, offset in the file, bytes' tensor) of each part of a piece that starts at row `first`."""
    tensors = {"weight": packed.data}
    if packed.scale is not None:
        tensors["weight_scale_inv" if matrix.format == "fp8_block" else "weight_scale"] = packed.scale
    if packed.scale_2 is not None and "weight_scale_2" in matrix.places and first == 0:
        tensors["weight_scale_2"] = packed.scale_2.reshape(())
    for suffix, tensor in tensors.items():
        place = matrix.places[suffix]
        before = 0
        if place.shape and suffix != "weight_scale_2":
            # rows of the part above this piece: one a matrix row, or one a block of 128
            rows = first // _BLOCK_ROWS if suffix == "weight_scale_inv" else first
            before = rows * (place.nbytes // place.shape[0])
        yield suffix, place.offset + before, tensor


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, where they lie if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def copy_range(source: int, destination: int, source_offset: int, offset: int, count: int) -> None:
    """Copy bytes between open files, in the kernel where it can. Raises RuntimeError where the source is too short."""
    done = 0
    in_kernel = hasattr(os, "copy_file_range")
    while done < count:
        moved = 0
        if in_kernel:
            try:
                moved = os.copy_file_range(source, destination, count - done, source_offset + done, offset + done)
            except OSError:
                in_kernel = False  # other file systems, old kernels
                continue
        else:
            data = os.pread(source, min(count - done, 1 << 22), source_offset + done)
            moved = write_at(destination, memoryview(data), offset + done)
        if moved == 0:
            raise RuntimeError(f"a source ended {count - done} bytes early; it was longer when it was counted")
        done += moved


def write_at(descriptor: int, data: memoryview, offset: int) -> int:
    """Write all bytes at an offset. pwrite keeps no shared position, so that threads may write in any order."""
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], offset + written)
    return written


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of a safetensors one that conversions write."""
    return {**_DTYPES, "U8": torch.uint8}[name]


def read_part(sources: SourceFiles, file: Path, dtype: str, offset: int, shape: tuple[int, ...]) -> Tensor:
    """A run of a written part, as stored."""
    count = 1
    for size in shape:
        count *= size
    return torch.frombuffer(sources.read(file, offset, count * DTYPE_BYTES[dtype]), dtype=dtype_of(dtype)).view(shape)
