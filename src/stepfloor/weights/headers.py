"""What a safetensors file says it holds, read from its header alone, and every way a file can be broken.

Source: the safetensors format (8-byte little-endian header length, JSON header, tensors back to back). Parsed
here because the library maps a truncated file without a word and stops at the first fault.
"""

import json
import mmap
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from stepfloor.formats.table import DTYPE_BYTES

# dtypes no tensor of ours may have, but whose size must be known to tell a wrong dtype from a broken file
_SIZES = DTYPE_BYTES | {"F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "U32": 4, "U64": 8}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_LFS = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored tensor: where its bytes lie. dtype is safetensors' name, offset counts from the file's start."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def read(self) -> memoryview:
        """The bytes, mapped and not copied: private and writable, so that torch.frombuffer takes them as they are."""
        return memoryview(_map(self.file))[self.offset : self.offset + self.nbytes]

    def rows(self, start: int, stop: int) -> "Entry":
        """Rows start..stop of the leading axis as an entry of its own."""
        row_bytes = self.nbytes // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        return Entry(self.file, self.dtype, shape, self.offset + start * row_bytes, (stop - start) * row_bytes)


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of one file by stored name, and what is wrong with the file, a sentence each.

    readable is False when no tensor could be listed, so that their absence is not reported a second time.
    """

    file: Path
    entries: dict[str, Entry]
    faults: tuple[str, ...]
    readable: bool = True


def read_header(path: Path) -> Header:
    """List the tensors of a file without reading them. Never raises for a broken file: see Header.faults."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(len(_LFS))
            if start_fault(path.name, head, size):
                return parse_header(path, head, size)
            return parse_header(path, head + file.read(max(8 + header_length(head) - len(head), 0)), size)
    except OSError as error:
        return Header(path, {}, (f"{path.name} cannot be read ({error.strerror}); fetch it again",), readable=False)


def header_length(head: bytes) -> int:
    """Bytes of the JSON header, by the first eight of the file."""
    return int.from_bytes(head[:8], "little")


def parse_header(path: Path, start: bytes, size: int) -> Header:
    """The same for a file of which only the first bytes are here: 8, the header, and perhaps more.

    path  or the name the file is known by; size  of the whole file in bytes
    """
    if fault := start_fault(path.name, start, size):
        return Header(path, {}, (fault,), readable=False)
    length = header_length(start)
    text = start[8 : 8 + length]
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, dict):
        fault = f"{path.name}: wanted a JSON header of {length} bytes; found something else; fetch the file again"
        return Header(path, {}, (fault,), readable=False)
    faults = _repeated_names(path.name, text, listed)
    entries: dict[str, Entry] = {}
    shapes: _Shapes = {}
    for name, info in listed.items():
        if name == "__metadata__":
            continue
        entry = _entry(path, 8 + length, info, shapes)
        if isinstance(entry, Entry):
            entries[name] = entry
        else:
            faults.append(f"{path.name}: {name} {entry}; fetch the file again")
    faults += _layout_faults(path.name, entries, 8 + length, size)
    return Header(path, entries, tuple(faults))


def start_fault(name: str, head: bytes, size: int) -> str | None:
    """What the first bytes of a file say is wrong with it, before its header is read; None if nothing."""
    length = header_length(head)
    if head.startswith(_LFS):
        return f"{name}: wanted tensors; found a Git LFS pointer of {size} bytes; run `git lfs pull` or fetch it again"
    if len(head) < 8:
        return f"{name}: wanted a safetensors file; found {size} bytes, less than a header; fetch it again"
    if length > size - 8:
        return (
            f"{name}: the header claims {length} bytes but only {size - 8} follow; the download was cut or this "
            "is no safetensors file; fetch it again"
        )
    if length > _MAX_HEADER_BYTES:
        return f"{name}: wanted a header of at most {_MAX_HEADER_BYTES} bytes; found {length}; export in more files"
    return None


def _repeated_names(file: str, text: bytes, listed: dict[str, Any]) -> list[str]:
    # json keeps the last of two equal keys; counting first spares the slow hook on a header of 10**5 tensors
    if text.count(b'"data_offsets"') <= len(listed):
        return []
    seen: set[str] = set()
    repeated: set[str] = set()

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, value in pairs if isinstance(value, dict)]
        repeated.update(n for n in names if n in seen or names.count(n) > 1)
        seen.update(names)
        return dict(pairs)

    json.loads(text, object_pairs_hook=note)
    return [f"{file}: {name} is listed twice in the header; export the file again" for name in sorted(repeated)]


# A release of single experts has 296,000 tensors of some twenty shapes: each kept once, not once a tensor.
_Shapes = dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], int]]


def _entry(path: Path, data_start: int, info: Any, shapes: _Shapes) -> Entry | str:
    """The entry, or what is wrong with its description."""
    try:
        dtype, shape, (begin, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        wanted = prod(shape) * _SIZES[dtype] if dtype in _SIZES else None
        whole = isinstance(begin, int) and isinstance(end, int) and all(type(d) is int and d >= 0 for d in shape)
    except (KeyError, TypeError, ValueError):
        return f"wanted dtype, shape and data_offsets in the header; found {info!r}"
    if wanted is None:
        return f"has dtype {dtype!r}, which no release uses"
    if not whole or begin < 0 or end - begin != wanted:
        return f"is {dtype} {list(shape)} and wants {wanted} bytes; data_offsets {[begin, end]} give another number"
    dtype = sys.intern(dtype)
    shape, nbytes = shapes.setdefault((dtype, shape), (shape, wanted))
    return Entry(path, dtype, shape, data_start + begin, nbytes)


def _layout_faults(file: str, entries: dict[str, Entry], data_start: int, size: int) -> list[str]:
    faults: list[str] = []
    reached, previous = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset < reached:
            faults.append(
                f"{file}: {name} overlaps {previous} by {reached - entry.offset} bytes; export the file again"
            )
        elif entry.offset > reached:
            faults.append(
                f"{file}: {entry.offset - reached} bytes between {previous} and {name} belong to no tensor; "
                "export the file again"
            )
        if entry.offset + entry.nbytes > reached:
            reached, previous = entry.offset + entry.nbytes, name
    if size < reached:
        faults.append(f"{file}: wanted {reached} bytes; found {size}; the download was cut, fetch it again")
    elif size > reached:
        faults.append(
            f"{file}: wanted {reached} bytes; found {size}: {size - reached} trailing bytes belong to no tensor; "
            "fetch it again"
        )
    return faults


# A map lives as long as a view on it: no file stays open once its tensors are loaded, and a file with
# 10**5 tensors is mapped once (Linux allows 65530 maps).
_maps: WeakValueDictionary[tuple[Path, int, int], mmap.mmap] = WeakValueDictionary()


def _map(path: Path) -> mmap.mmap:
    stat = path.stat()
    key = (path, stat.st_size, stat.st_mtime_ns)
    mapped = _maps.get(key)
    if mapped is None:
        with path.open("rb") as file:
            if sys.platform == "linux":
                # MAP_NORESERVE (named in Python 3.13): a private writable map of a 54 GB shard otherwise counts
                # as 54 GB of promised memory and is refused on smaller machines
                flags = mmap.MAP_PRIVATE | 0x4000
                mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            else:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        _maps[key] = mapped
    return mapped
