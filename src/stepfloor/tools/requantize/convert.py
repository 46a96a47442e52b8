"""Carry out a planned conversion: streaming, on all cores, and safe to interrupt and run again.

Everything is made in a directory beside the result, which appears under its name only when it is whole. A journal
beside it says which units are on disk; it is written after they are, so a crash costs at most what was under way.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepfloor.errors import UserError
from stepfloor.tools.requantize.pieces import (
    SourceFiles,
    Unit,
    as_bytes,
    convert_piece,
    copy_range,
    parts_of,
    pieces,
    tensor_scales,
    units_of,
    write_at,
)
from stepfloor.weights.conversions import MANIFEST, REPORT, NewFile, Plan

# units go to disk before the journal says so; less often costs more after a crash, more often stalls the disk
_COMMIT_BYTES = 256 << 20
MAX_JOBS = 16  # 116 MB beyond torch at 296,145 tensors, and 150 are promised


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a result goes.

    final    its directory; partial  where it is made; journal  what of it is done
    ref      file of a Hugging Face cache that names the snapshot, or None
    """

    final: Path
    partial: Path
    journal: Path
    ref: Path | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a conversion did. written: bytes of new files in this run; copied: files that could not be linked."""

    directory: Path
    written: int
    copied: tuple[str, ...]
    existed: bool = False


def destination(name: str, cache: Path, plan: Plan) -> Destination:
    """A path (it begins with /, ./, ../ or ~, or exists), else owner/name in the Hugging Face cache."""
    path = Path(name).expanduser()
    if name.startswith(("/", "./", "../", "~")) or path.is_dir() or name.count("/") != 1:
        final = path.absolute()
        partial = final.with_name(f".{final.name}.partial")
        return Destination(final, partial, partial.with_suffix(".journal"))
    repository = cache / f"models--{name.replace('/', '--')}"
    partial = repository / ".partial" / plan.snapshot
    return Destination(
        repository / "snapshots" / plan.snapshot, partial, partial.with_suffix(".journal"), repository / "refs" / "main"
    )


def convert(
    plan: Plan,
    to: Destination,
    *,
    jobs: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Make the result of a plan, going on where an interrupted run of the same plan stopped.

    jobs     threads; all cores without it, at most 16
    advance  called with the bytes of each unit that is done, those of an earlier run included
    Raises UserError where something else is in the way, another run is at work, or the disk is too small.
    """
    if _is_done(plan, to.final):
        _point(to)
        to.journal.unlink(missing_ok=True)
        return Outcome(to.final, 0, (), existed=True)
    if to.final.exists() and (not to.final.is_dir() or any(to.final.iterdir())):
        raise UserError(f"wanted a new or empty directory; {to.final} has something in it; choose another")
    to.partial.mkdir(parents=True, exist_ok=True)
    to.final.parent.mkdir(parents=True, exist_ok=True)
    with _Journal(to.journal, plan.digest) as journal:
        if not journal.resumed:
            _clear(to.partial)
        _want_space(plan, to, journal)
        written = _write_files(plan, to.partial, journal, min(jobs or os.cpu_count() or 1, MAX_JOBS), advance)
        copied = _link_files(plan, to.partial)
        for name, document in plan.documents.items():
            _write_document(to.partial / name, document)
        _sync_directory(to.partial)
        if to.final.exists():
            to.final.rmdir()  # empty, as seen above
        to.partial.rename(to.final)
        _sync_directory(to.final.parent)
    _point(to)
    to.journal.unlink(missing_ok=True)
    if to.ref is not None and not any(to.partial.parent.iterdir()):
        to.partial.parent.rmdir()
    return Outcome(to.final, written, tuple(copied))


class _Journal:
    """Which units of which file are on disk, for one plan; and a lock, so that two runs do not write the same file."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path, self._digest = path, digest
        self.done: dict[str, set[int]] = {}
        self.resumed = False

    def __enter__(self) -> "_Journal":
        self._file = self._path.open("a+", encoding="utf-8")
        _lock(self._file.fileno(), self._path)
        self._file.seek(0)
        # a line that a crash cut short does not count
        lines = [line for line in self._file.read().split("\n")[:-1] if line]
        if lines and lines[0] == self._digest:
            self.resumed = True
            for line in lines[1:]:
                name, _, units = line.rpartition(" ")
                self.done.setdefault(name, set()).update(int(unit) for unit in units.split(","))
        else:
            self._file.truncate(0)
        # also ends a line that was cut
        self._file.write("\n" if lines and self.resumed else f"{self._digest}\n")
        self._sync()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, name: str, units: list[int]) -> None:
        """Note units whose bytes have reached the disk."""
        self._file.write(f"{name} {','.join(map(str, units))}\n")
        self._sync()
        self.done.setdefault(name, set()).update(units)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows, where a second run is the user's own affair
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"another conversion is at work on {path.with_suffix('')}; wait for it or end it") from None


def _write_files(plan: Plan, partial: Path, journal: _Journal, jobs: int, advance: Callable[[int], None]) -> int:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the units are the parallelism
    try:
        with SourceFiles() as sources, ThreadPoolExecutor(jobs) as pool:
            scales = tensor_scales(plan, sources, pool)
            return sum(_write_file(file, partial, sources, scales, journal, pool, advance) for file in plan.files)
    finally:
        torch.set_num_threads(threads)


def _write_file(
    file: NewFile,
    partial: Path,
    sources: SourceFiles,
    scales: dict[str, Tensor],
    journal: _Journal,
    pool: ThreadPoolExecutor,
    advance: Callable[[int], None],
) -> int:
    """Write what is missing of one file; returns the bytes read for it in this run."""
    units = units_of(file)
    path = partial / file.name
    whole = path.exists() and path.stat().st_size == file.nbytes
    # a journal whose file somebody removed speaks of nothing
    done = journal.done.get(file.name, set()) if whole else set[int]()
    missing = [i for i in range(len(units)) if i not in done]
    advance(sum(units[i].nbytes for i in done))
    if not missing:
        return 0
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(descriptor, file.nbytes)
        write_at(descriptor, memoryview(file.header), 0)
        for name, place in file.scalars:
            write_at(descriptor, as_bytes(scales[name].reshape(())), place.offset)
        waiting: list[int] = []
        unsynced = 0
        queued = {pool.submit(_write_unit, units[i], descriptor, sources, scales): i for i in missing}
        try:
            for finished in as_completed(queued):
                finished.result()
                i = queued[finished]
                waiting.append(i)
                unsynced += units[i].nbytes
                advance(units[i].nbytes)
                if unsynced >= _COMMIT_BYTES:
                    _sync_data(descriptor)
                    journal.add(file.name, waiting)
                    waiting.clear()
                    unsynced = 0
        except BaseException:
            for future in queued:
                future.cancel()
            raise
        os.fsync(descriptor)
        if waiting:
            journal.add(file.name, waiting)
    finally:
        os.close(descriptor)
    return sum(units[i].nbytes for i in missing)


def _write_unit(unit: Unit, descriptor: int, sources: SourceFiles, scales: dict[str, Tensor]) -> None:
    if unit.matrix is None:
        copy_range(sources.descriptor(unit.source), descriptor, unit.source_offset, unit.offset, unit.stop - unit.first)
        return
    rows = unit.matrix.rows
    sources.expect(unit.source, rows.offset + unit.first * rows.row_bytes, unit.nbytes)
    for first, stop in pieces(unit.matrix, unit.first, unit.stop):
        _, packed = convert_piece(unit.matrix, first, stop, sources, scales)
        for _, offset, tensor in parts_of(unit.matrix, packed, first):
            write_at(descriptor, as_bytes(tensor), offset)


def taken_over(plan: Plan) -> list[Path]:
    """Files of the source that the result has as they are: untouched shards, tokenizer and the like."""
    shards = [plan.source / name for name in plan.linked]
    made = {*plan.documents, "hf_quant_config.json", MANIFEST, REPORT}
    others = [
        path
        for path in sorted(plan.source.iterdir())
        if path.suffix != ".safetensors" and path.name not in made and not path.name.startswith(".") and path.is_file()
    ]
    return shards + others


def _link_files(plan: Plan, partial: Path) -> list[str]:
    """Link each file to the bytes the source has; returns the names of those that had to be copied."""
    copied: list[str] = []
    for path in taken_over(plan):
        source, target = path.resolve(), partial / path.name
        if target.exists():
            if os.path.samefile(source, target):
                continue
            target.unlink()
        try:
            os.link(source, target)
        except OSError as error:
            # another file system, one without links, or one that forbids them to this user
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES):
                raise
            beside = target.with_name(f".{target.name}")
            shutil.copyfile(source, beside)
            beside.rename(target)
            copied.append(path.name)
    return copied


def _is_done(plan: Plan, final: Path) -> bool:
    """Whether the result is there already: a directory appears whole, so its manifest is enough."""
    try:
        manifest: Any = json.loads((final / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(manifest == plan.documents[MANIFEST])


def _want_space(plan: Plan, to: Destination, journal: _Journal) -> None:
    present = sum(
        (to.partial / file.name).stat().st_blocks * 512 for file in plan.files if (to.partial / file.name).exists()
    )
    wanted = max(0, plan.written_bytes - present)
    free = shutil.disk_usage(to.partial).free
    if free < wanted:
        raise UserError(
            f"this conversion writes {wanted / 1e9:.1f} GB more; {to.partial.parent} has {free / 1e9:.1f} GB free; "
            "choose another disk"
        )


def _clear(partial: Path) -> None:
    """Empty what a run of another plan left."""
    for path in partial.iterdir():
        path.unlink()


def _point(to: Destination) -> None:
    """Let the cache's main revision be this snapshot, all at once."""
    if to.ref is not None:
        to.ref.parent.mkdir(parents=True, exist_ok=True)
        beside = to.ref.with_name(f".{to.ref.name}")
        _write_text(beside, to.final.name)
        beside.rename(to.ref)


def _write_document(path: Path, document: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=2)  # piece by piece: an index of 296,000 names is 32 MB, its pieces 100
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# of the bytes alone, where the system knows the difference
_sync_data = getattr(os, "fdatasync", os.fsync)


def _sync_directory(path: Path) -> None:
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def convert_with_progress(plan: Plan, to: Destination, jobs: int | None = None) -> Outcome:
    """convert with a bar on the terminal, and a line for everything worth knowing."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    total = sum(unit.nbytes for file in plan.files for unit in units_of(file))
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    start = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        outcome = convert(plan, to, jobs=jobs, advance=lambda n: progress.advance(task, n))
    seconds = time.perf_counter() - start
    if outcome.existed:
        print(f"{outcome.directory}: there already, made by the same conversion")
        return outcome
    print(
        f"{outcome.directory}: {len(plan.formats)} tensors converted, {len(plan.files)} files written "
        f"({plan.written_bytes:,} bytes), {len(plan.linked)} linked; {outcome.written / seconds / 1e6:.0f} MB/s read"
    )
    if outcome.copied:
        print(
            f"copied, since this file system cannot link to the source: {len(outcome.copied)} files "
            f"({', '.join(outcome.copied[:3])}{', ...' if len(outcome.copied) > 3 else ''})"
        )
    return outcome
