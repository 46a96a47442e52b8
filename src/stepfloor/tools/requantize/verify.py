"""Prove a converted checkpoint: every byte that should be the source's is, and every other is what conversion gives.

With the source at hand the plan is made again and each written file compared with it: header, scales, codes, tensors
taken over. Without it, what the files say of themselves is checked. Errors of dequantization are measured either way
that they can be, by class, and the whole is kept as JSON in the snapshot.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepfloor.errors import UserError
from stepfloor.formats.codec import PackedWeight
from stepfloor.tools.requantize.convert import MAX_JOBS, taken_over
from stepfloor.tools.requantize.pieces import (
    SourceFiles,
    Unit,
    as_bytes,
    convert_piece,
    parts_of,
    pieces,
    read_part,
    tensor_scales,
    units_of,
)
from stepfloor.weights.checkpoint import INDEX, Checkpoint, open_checkpoint
from stepfloor.weights.conversions import MANIFEST, REPORT, Matrix, NewFile, Plan, category_of, plan_conversion
from stepfloor.weights.headers import read_header

_COMPARED_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Limit:
    """Worst relative RMS error and cosine a matrix of one format may have against its source."""

    relative_rms: float
    cosine: float


# E4M3 keeps 4 significant bits: errors uniform in half a step average 0.026 of the value over an octave, a little more
# where a block's scale is a power of two (MXFP8). FP4 keeps 2: 0.10 on normal values, more where few are large. A wrong
# scale, a shifted row or a swapped nibble is far outside; a matrix of zeros or of one value has no error at all.
LIMITS = {
    "fp8_channel": Limit(0.030, 0.9995),
    "fp8_block": Limit(0.030, 0.9995),
    "mxfp8": Limit(0.032, 0.9994),
    "nvfp4": Limit(0.130, 0.991),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault.

    kind  census, metadata, manifest, files, config, index, header, link, taken over, scale, codes or error
    """

    kind: str
    message: str


@dataclass(slots=True)
class _Error:
    """Sums of one matrix's error, and its worst rows as (relative RMS, row)."""

    difference: float = 0.0
    source: float = 0.0
    result: float = 0.0
    product: float = 0.0
    worst: list[tuple[float, int]] = field(default_factory=list)

    def add(self, values: Tensor, decoded: Tensor, first: int) -> None:
        difference = (decoded - values).square_().sum(-1)
        source = values.square().sum(-1)
        self.difference += float(difference.sum(dtype=torch.float64))
        self.source += float(source.sum(dtype=torch.float64))
        self.result += float(decoded.square().sum(dtype=torch.float64))
        self.product += float((decoded * values).sum(dtype=torch.float64))
        relative = (difference / source.clamp(min=1e-30)).sqrt_()
        relative[source == 0] = 0.0
        top = torch.topk(relative, min(3, relative.numel()))
        self.worst += [(float(v), first + int(i)) for v, i in zip(top.values, top.indices, strict=True)]
        self.worst = sorted(self.worst, reverse=True)[:3]

    def merge(self, other: "_Error") -> None:
        self.difference += other.difference
        self.source += other.source
        self.result += other.result
        self.product += other.product
        self.worst = sorted(self.worst + other.worst, reverse=True)[:3]

    @property
    def relative_rms(self) -> float:
        return math.sqrt(self.difference / self.source) if self.source else math.sqrt(self.difference)

    @property
    def cosine(self) -> float:
        return self.product / math.sqrt(self.source * self.result) if self.source and self.result else 1.0


@dataclass(slots=True)
class _Checked:
    """What one unit gave: faults, and the error of its rows."""

    findings: list[Finding] = field(default_factory=list)
    error: _Error = field(default_factory=_Error)


def verify(
    directory: Path,
    source: Checkpoint | None,
    *,
    jobs: int | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Check a converted checkpoint and return the report; `findings` is empty where nothing is wrong.

    source   what it was made from, for everything that takes two; None checks what one can
    advance  called with (bytes checked, bytes in all)
    Raises UserError for a directory that no conversion made.
    """
    manifest = _manifest(directory)
    findings: list[Finding] = []
    census = _census(directory, findings)
    tensors: list[dict[str, Any]] = []
    if source is not None:
        plan = _planned_again(source, manifest, findings)
        if plan is not None:
            tensors = _against_source(directory, plan, findings, min(jobs or os.cpu_count() or 1, MAX_JOBS), advance)
    elif census is not None:
        findings += _alone(census, manifest)
    report = {
        "conversion": manifest["conversion"],
        "source": manifest["source"],
        "compared_with_source": source is not None,
        "converted": len(manifest["converted"]),
        "findings": [{"kind": f.kind, "message": f.message} for f in findings],
        "classes": _classes(tensors),
        "tensors": tensors,
    }
    if directory.is_dir():
        (directory / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def source_in_cache(directory: Path, cache: Path) -> Path | None:
    """The snapshot that the manifest names as source, if the Hugging Face cache has it."""
    source = _manifest(directory)["source"]
    repository, revision = source.get("repository"), source.get("revision")
    if not isinstance(repository, str) or not isinstance(revision, str):
        return None
    found = cache / repository / "snapshots" / revision
    return found if found.is_dir() else None


def _manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        wanted = {"conversion": str, "left": list, "converted": dict, "source": dict, "written": list, "linked": list}
        if any(not isinstance(manifest[key], kind) for key, kind in wanted.items()):
            raise ValueError("a key has the wrong type")
    except FileNotFoundError:
        raise UserError(f"{directory} has no {MANIFEST}; `stepfloor convert` leaves one in what it makes") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is broken ({error}); convert again") from None
    found: dict[str, Any] = manifest
    return found


def _census(directory: Path, findings: list[Finding]) -> Checkpoint | None:
    """The census of the result: each of its faults and each contradiction of its metadata is a finding."""
    try:
        checkpoint = open_checkpoint(directory)
    except UserError as error:
        lines = str(error).split("\n")
        findings += [Finding("census", line.removeprefix("  - ")) for line in (lines[1:] or lines)]
        return None
    findings += [Finding("metadata", f.message) for f in checkpoint.findings if f.kind in ("metadata", "index")]
    return checkpoint


def _planned_again(source: Checkpoint, manifest: dict[str, Any], findings: list[Finding]) -> Plan | None:
    try:
        plan = plan_conversion(source, manifest["conversion"], manifest["left"])
    except UserError as error:
        findings.append(Finding("manifest", f"the conversion it names cannot be planned from this source: {error}"))
        return None
    if manifest != plan.documents[MANIFEST]:
        differing = [k for k, v in plan.documents[MANIFEST].items() if manifest.get(k) != v]
        findings.append(Finding("manifest", f"{MANIFEST} differs from the plan in {', '.join(differing) or 'keys'}"))
    return plan


def _against_source(
    directory: Path, plan: Plan, findings: list[Finding], jobs: int, advance: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    findings += _check_files(directory, plan)
    findings += _check_documents(directory, plan)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    errors: dict[str, _Error] = {}
    formats: dict[str, str] = {}
    try:
        with SourceFiles() as sources, SourceFiles() as results, ThreadPoolExecutor(jobs) as pool:
            findings += _check_taken_over(directory, plan, pool)
            scales = tensor_scales(plan, sources, pool)
            work = [(file, unit) for file in plan.files if _same_header(directory, file) for unit in units_of(file)]
            total, done = sum(unit.nbytes for _, unit in work), 0

            def check(job: tuple[NewFile, Unit]) -> _Checked:
                return _check_unit(directory / job[0].name, job[1], sources, results, scales)

            for file in plan.files:
                if _same_header(directory, file):
                    findings += _check_scalars(directory / file.name, file, results, scales)
            for (_, unit), checked in zip(work, pool.map(check, work), strict=True):
                findings += checked.findings
                done += unit.nbytes
                advance(done, total)
                if unit.matrix is not None:
                    errors.setdefault(unit.matrix.name, _Error()).merge(checked.error)
                    formats[unit.matrix.name] = unit.matrix.format
    finally:
        torch.set_num_threads(threads)
    tensors = [_tensor_report(name, formats[name], error) for name, error in errors.items()]
    for t in tensors:
        limit = LIMITS[t["format"]]
        if t["relative_rms"] > limit.relative_rms or t["cosine"] < limit.cosine:
            row = t["worst_rows"][0]["row"] if t["worst_rows"] else 0
            findings.append(
                Finding(
                    "error",
                    f"{t['name']}: relative RMS {t['relative_rms']:.4f} and cosine {t['cosine']:.5f}; {t['format']} "
                    f"may have {limit.relative_rms} and {limit.cosine}; row {row} is the worst",
                )
            )
    return tensors


def _check_files(directory: Path, plan: Plan) -> list[Finding]:
    there = {path.name for path in directory.iterdir() if not path.name.startswith(".")}
    wanted = {f.name for f in plan.files} | {p.name for p in taken_over(plan)} | set(plan.documents)
    found = [Finding("files", f"{name} is missing") for name in sorted(wanted - there)]
    found += [Finding("files", f"{name} belongs to no plan") for name in sorted(there - wanted - {REPORT})]
    for file in plan.files:
        path = directory / file.name
        if not path.is_file():
            continue
        if path.stat().st_size != file.nbytes:
            found.append(Finding("files", f"{file.name}: wanted {file.nbytes} bytes; found {path.stat().st_size}"))
        if not _same_header(directory, file):
            found.append(Finding("header", f"{file.name}: {_header_difference(path, file)}"))
    return found


def _same_header(directory: Path, file: NewFile) -> bool:
    path = directory / file.name
    if not path.is_file() or path.stat().st_size != file.nbytes:
        return False
    with path.open("rb") as opened:
        return opened.read(len(file.header)) == file.header


def _header_difference(path: Path, file: NewFile) -> str:
    """The first tensor that is not as planned."""
    wanted = json.loads(file.header[8:])
    wanted.pop("__metadata__", None)
    entries = read_header(path).entries
    for name, info in wanted.items():
        entry = entries.get(name)
        if entry is None:
            return f"{name} is missing"
        if entry.dtype != info["dtype"] or list(entry.shape) != info["shape"]:
            return f"{name}: wanted {info['dtype']} {info['shape']}; found {entry.dtype} {list(entry.shape)}"
    extra = sorted(set(entries) - set(wanted))
    return f"{extra[0]} belongs to no plan" if extra else "tensors lie in other places than planned"


def _check_documents(directory: Path, plan: Plan) -> list[Finding]:
    found: list[Finding] = []
    for name, document in plan.documents.items():
        path = directory / name
        if name == MANIFEST or not path.is_file():
            continue
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            found.append(Finding("files", f"{name} is not valid JSON ({error})"))
            continue
        if stored != document:
            kind = "index" if name == INDEX else "config"
            found.append(Finding(kind, f"{name}: {_document_difference(document, stored)}"))
    return found


def _document_difference(wanted: Any, found: Any, path: str = "") -> str:
    """Where two JSON values part first."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in (*wanted, *found):
            if key not in found:
                return f"{path}{key} is missing"
            if key not in wanted:
                return f"{path}{key} belongs to no plan"
            if wanted[key] != found[key]:
                return _document_difference(wanted[key], found[key], f"{path}{key}.")
    return f"{path.rstrip('.')}: wanted {wanted!r}; found {found!r}"


def _check_taken_over(directory: Path, plan: Plan, pool: ThreadPoolExecutor) -> list[Finding]:
    def check(path: Path) -> list[Finding]:
        source, target = path.resolve(), directory / path.name
        if not target.is_file() or os.path.samefile(source, target):
            return []
        found: list[Finding] = []
        if source.stat().st_dev == target.stat().st_dev:
            found.append(
                Finding("link", f"{path.name} is a copy of the source's file, or another; a link to it is possible")
            )
        if not _same_bytes(source, target):
            found.append(Finding("taken over", f"{path.name} has other bytes than the source's"))
        return found

    return [finding for findings in pool.map(check, taken_over(plan)) for finding in findings]


def _same_bytes(first: Path, second: Path) -> bool:
    if first.stat().st_size != second.stat().st_size:
        return False
    with first.open("rb") as a, second.open("rb") as b:
        while block := a.read(_COMPARED_BYTES):
            if block != b.read(_COMPARED_BYTES):
                return False
    return True


def _check_scalars(path: Path, file: NewFile, results: SourceFiles, scales: dict[str, Tensor]) -> list[Finding]:
    found: list[Finding] = []
    for name, place in file.scalars:
        stored = float(read_part(results, path, place.dtype, place.offset, (1,)))
        wanted = float(scales[name])
        if stored != wanted:
            found.append(
                Finding("scale", f"{name}: the scale of all shards is {stored:g}; conversion gives {wanted:g}")
            )
    return found


def _check_unit(
    path: Path, unit: Unit, sources: SourceFiles, results: SourceFiles, scales: dict[str, Tensor]
) -> _Checked:
    if unit.matrix is None:
        return _Checked(_check_copy(path, unit, sources, results))
    matrix, checked = unit.matrix, _Checked()
    for first, stop in pieces(matrix, unit.first, unit.stop):
        values, wanted = convert_piece(matrix, first, stop, sources, scales)
        stored: dict[str, Tensor] = {}
        for suffix, offset, tensor in parts_of(matrix, wanted, first):
            stored[suffix] = read_part(results, path, matrix.places[suffix].dtype, offset, tuple(tensor.shape))
            if as_bytes(stored[suffix]) != as_bytes(tensor):
                kind = "codes" if suffix == "weight" else "scale"
                finding = Finding(kind, f"{matrix.name}.{suffix}: {_first_difference(stored[suffix], tensor, first)}")
                checked.findings.append(finding)
        checked.error.add(values, _decoded(matrix, stored, wanted, scales), first)
    return checked


def _decoded(matrix: Matrix, stored: dict[str, Tensor], wanted: PackedWeight, scales: dict[str, Tensor]) -> Tensor:
    """The stored piece in float32."""
    scale = stored.get("weight_scale", stored.get("weight_scale_inv"))
    scale_2 = stored.get("weight_scale_2", wanted.scale_2)
    if matrix.format == "nvfp4" and scale_2 is None:
        scale_2 = scales[matrix.shared or matrix.name]
    return PackedWeight(matrix.format, wanted.shape, stored["weight"], scale, scale_2).dequantize()


def _first_difference(stored: Tensor, wanted: Tensor, first: int) -> str:
    a, b = stored.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)
    at = int((a != b).nonzero()[0])
    per_row = a.numel() // stored.shape[0] if stored.dim() else a.numel()
    row = first + at // per_row if stored.dim() > 1 or stored.numel() > 1 else 0
    return f"{int((a != b).sum())} bytes differ from what conversion gives, the first near row {row}"


def _check_copy(path: Path, unit: Unit, sources: SourceFiles, results: SourceFiles) -> list[Finding]:
    count = unit.stop - unit.first
    for start in range(0, count, _COMPARED_BYTES):
        size = min(_COMPARED_BYTES, count - start)
        wanted = sources.read(unit.source, unit.source_offset + start, size)
        if results.read(path, unit.offset + start, size) != wanted:
            name = _tensor_at(path, unit.offset + start)
            return [Finding("taken over", f"{name} in {path.name} has other bytes than the source's")]
    return []


def _tensor_at(path: Path, offset: int) -> str:
    for name, entry in read_header(path).entries.items():
        if entry.offset <= offset < entry.offset + max(entry.nbytes, 1):
            return name
    return f"byte {offset}"


def _alone(census: Checkpoint, manifest: dict[str, Any]) -> list[Finding]:
    """What the result says of itself: formats as the manifest names them, scales finite, positive and not all alike."""
    found: list[Finding] = []
    for name, form in manifest["converted"].items():
        for weight in _weights_of(census, name):
            if weight.format != form:
                found.append(Finding("manifest", f"{weight.name} is {weight.format}; {MANIFEST} says {form}"))
                continue
            for part, entry in weight.parts.items():
                if part == "weight" or entry.dtype not in ("F32", "BF16", "F8_E4M3"):
                    continue
                dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}[entry.dtype]
                values = torch.frombuffer(entry.read(), dtype=dtype).float()
                if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
                    found.append(Finding("scale", f"{weight.name}.{part} has values that are no scale"))
    return found


def _weights_of(census: Checkpoint, name: str) -> Iterator[Any]:
    if name in census.weights:
        yield census.weights[name]
        return
    # fused experts became one matrix each
    block, _, leaf = name.rpartition(".")
    leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    for e in range(census.config.num_experts):
        for one in leaves:
            if (weight := census.weights.get(f"{block}.{e}.{one}")) is not None:
                yield weight


def _tensor_report(name: str, form: str, error: _Error) -> dict[str, Any]:
    return {
        "name": name,
        "format": form,
        "class": f"{'drafter, ' if name.startswith('mtp.') else ''}{_class_of(name)}",
        "relative_rms": error.relative_rms,
        "cosine": error.cosine,
        "worst_rows": [{"row": row, "relative_rms": value} for value, row in error.worst],
    }


def _class_of(name: str) -> str:
    # the gates of the hyper-connections are four rows each, and worse than the rest: told apart
    if name.endswith("block_inject_weight"):
        return "hyper-connection gates"
    return "input" if name.startswith("mtp.fc_") else category_of(name)


def _classes(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for tensor in tensors:
        groups.setdefault((tensor["class"], tensor["format"]), []).append(tensor)
    found: list[dict[str, Any]] = []
    for (name, form), members in groups.items():
        rms = sorted(t["relative_rms"] for t in members)
        found.append(
            {
                "class": name,
                "format": form,
                "tensors": len(members),
                "relative_rms": {"min": rms[0], "median": rms[len(rms) // 2], "max": rms[-1]},
                "cosine_min": min(t["cosine"] for t in members),
                "limit": {"relative_rms": LIMITS[form].relative_rms, "cosine": LIMITS[form].cosine},
            }
        )
    return found


def verify_with_progress(directory: Path, source: Checkpoint | None, jobs: int | None = None) -> bool:
    """verify with a bar, a table of classes, and every finding; True where there is none."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        report = verify(
            directory, source, jobs=jobs, advance=lambda done, total: progress.update(task, completed=done, total=total)
        )
    for c in report["classes"]:
        rms = c["relative_rms"]
        print(
            f"{c['class']:32} {c['format']:11} {c['tensors']:6}  relative RMS {rms['min']:.4f} / {rms['median']:.4f} / "
            f"{rms['max']:.4f} (at most {c['limit']['relative_rms']}), cosine at least {c['cosine_min']:.5f}"
        )
    for finding in report["findings"]:
        print(f"{finding['kind']}: {finding['message']}")
    against = "against its source" if report["compared_with_source"] else "by itself; --source compares every byte"
    print(f"{report['converted']} converted tensors checked {against}: {len(report['findings'])} findings")
    return not report["findings"]
