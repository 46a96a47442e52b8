"""Plan a conversion: which matrices change into which format, which files are written anew, and what metadata says.

Nothing is read but headers and JSON, and nothing is written. A plan fixes every byte's place before the first is made:
headers, offsets, names, index and config. What a file holds beside the converted matrices is copied as it is; files
that hold none are linked.
Source: layouts of `formats.table`; vLLM 0.33's ModelOpt mixed-precision config, which reads the metadata written here.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from stepfloor.errors import UserError
from stepfloor.formats.table import DTYPE_BYTES, FORMATS, Shape
from stepfloor.weights.checkpoint import INDEX, Checkpoint, Weight
from stepfloor.weights.expected import category, fused_experts, split_name
from stepfloor.weights.headers import Entry, read_header

MANIFEST = "stepfloor_conversion.json"
REPORT = "stepfloor_verify.json"
CONVERSIONS = ("fp8-dense", "mtp-fp8", "head-mxfp8", "draft-head-nvfp4", "ple-nvfp4")
# what may be left as it is, by the word of the command line
GROUPS = {
    "gdn": "gated delta net",
    "qsa": "sparse attention",
    "hc": "hyper-connections",
    "shared": "shared experts",
    "head": "lm_head",
    "experts": "routed experts",
    "input": "norms and other",  # the drafter's two input matrices
}
_REVISION = 1  # of the converter: a change of its bytes changes this
_DRAFT_HEAD_FILE = "model-draft-head.safetensors"
_DENSE = tuple(GROUPS[g] for g in ("gdn", "qsa", "hc", "shared"))
_PLAIN = ("bf16", "fp32")
_ALGORITHMS = {
    "fp8_channel": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "fp8_block": {"quant_algo": "FP8_PB_WO", "group_size": 128},
    "fp8_tensor": {"quant_algo": "FP8"},
    "mxfp8": {"quant_algo": "MXFP8", "group_size": 32},
    "nvfp4": {"quant_algo": "NVFP4", "group_size": 16},
}
_TABLE_DTYPES = {"fp8_tensor": "float8_e4m3fn", "nvfp4": "nvfp4"}
# stock vLLM 0.33 gives these no quantization config, or fuses them with the bf16 indexer
STOCK_VLLM_LEAVES = ("hc", "head", "qsa")


@dataclass(frozen=True, slots=True)
class Rows:
    """A matrix [n, k] as the source stores it: plain, or FP8 codes with one scale for all.

    offset  of its first byte in the file
    """

    file: Path
    dtype: str
    offset: int
    n: int
    k: int
    scale: Entry | None = None

    @property
    def row_bytes(self) -> int:
        return self.k * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of a file that is written: dtype, shape, and the offset of its first byte in that file."""

    dtype: str
    shape: Shape
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix to convert.

    name    canonical; format  wanted; places  where each part goes, by suffix
    shared  what carries the scale of the whole tensor where it is not this matrix's own: the table's name
    """

    name: str
    format: str
    rows: Rows
    places: dict[str, Place]
    shared: str | None = None


@dataclass(frozen=True, slots=True)
class Copied:
    """One tensor whose bytes are taken over; offset is its new place."""

    name: str
    entry: Entry
    offset: int


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is written: its header, its size, what is converted and what is copied into it.

    scalars  scales of a whole tensor: (canonical name, place)
    """

    name: str
    header: bytes
    nbytes: int
    matrices: tuple[Matrix, ...]
    copies: tuple[Copied, ...]
    scalars: tuple[tuple[str, Place], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A conversion before it is done.

    source     directory of what is converted
    formats    canonical name of each converted weight -> its new format
    files      written anew; linked  names of files taken over as they are; documents  JSON files, manifest included
    digest     of everything above and of the source's files: work of one digest can be resumed
    snapshot   name of the directory in a Hugging Face cache
    """

    kind: str
    source: Path
    formats: dict[str, str]
    files: tuple[NewFile, ...]
    linked: tuple[str, ...]
    documents: dict[str, dict[str, Any]]
    digest: str
    snapshot: str

    @property
    def written_bytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def notes(self) -> tuple[str, ...]:
        """What stock vLLM 0.33 would not make of the result; stepfloor reads all of it."""
        reached = {category_of(name) for name in self.formats}
        found: list[str] = []
        if self.kind != "draft-head-nvfp4" and GROUPS["head"] in reached:
            found.append("the head gets no quantization in stock vLLM 0.33, which would read its codes as numbers")
        if GROUPS["hc"] in reached:
            found.append("hyper-connections get no quantization in stock vLLM 0.33; `--stock-vllm` leaves them")
        if GROUPS["qsa"] in reached:
            found.append(
                "stock vLLM 0.33 joins q, k and v with the bf16 indexer in one matrix; `--stock-vllm` leaves them"
            )
        if self.kind == "draft-head-nvfp4":
            found.append("stock vLLM 0.33 knows no mtp.lm_head and refuses to load it")
        return tuple(found)


def plan_conversion(checkpoint: Checkpoint, kind: str, leave: Iterable[str] = ()) -> Plan:
    """Decide every byte of a conversion.

    kind   one of CONVERSIONS; leave  groups that stay as they are, names in GROUPS
    Raises UserError where there is nothing to convert, or a format cannot hold a matrix.
    """
    left = tuple(leave)
    if kind not in CONVERSIONS:
        raise UserError(f"wanted one of {', '.join(CONVERSIONS)}; got {kind!r}")
    if unknown := [group for group in left if group not in GROUPS]:
        raise UserError(f"--leave takes {', '.join(GROUPS)}; got {', '.join(unknown)}")
    formats = _targets(checkpoint, kind, {GROUPS[group] for group in left})
    for name, form in formats.items():
        _refuse_odd_rows(name, form, checkpoint)
    build = _Build(checkpoint, formats)
    build.take_files()
    if kind == "draft-head-nvfp4":
        build.add_draft_head()
    return build.plan(kind, left)


def category_of(name: str) -> str:
    """What kind of matrix a canonical name is, the drafter's as the target's."""
    return category(name.removeprefix("mtp."))


def _targets(checkpoint: Checkpoint, kind: str, left: set[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    table = checkpoint.table
    for name, weight in checkpoint.weights.items():
        drafter = name.startswith("mtp.")
        what = category_of(name)
        plain = weight.format in _PLAIN and (len(weight.shape) == 2 or ".mlp.experts." in name)
        dense = plain and what in _DENSE and not name.endswith(("in_proj_a", "in_proj_b"))
        if what in left:
            continue
        if kind == "fp8-dense" and not drafter and (dense or (plain and what == "lm_head")):
            found[name] = "fp8_channel"
        elif kind == "mtp-fp8" and drafter and plain and ".mlp.experts." in name:
            found[name] = "fp8_block"
        elif kind == "mtp-fp8" and drafter and (dense or (plain and name.startswith("mtp.fc_"))):
            found[name] = "fp8_channel"
        elif kind == "head-mxfp8" and name == "lm_head" and plain:
            found[name] = "mxfp8"
        elif kind == "ple-nvfp4" and name.startswith(f"{table.name}.shard_") and table.format != "nvfp4":
            found[name] = "nvfp4"
    if kind == "draft-head-nvfp4":
        if not checkpoint.has_drafter:
            raise UserError(f"{checkpoint.directory} has no drafter (mtp.*), so a head for it would serve nobody")
        if "mtp.lm_head" in checkpoint.weights:
            raise UserError(f"{checkpoint.directory} has a draft head of its own already (mtp.lm_head)")
        if checkpoint.weights["lm_head"].format not in _PLAIN:
            raise UserError(
                f"the draft head is made from the head, which {checkpoint.directory} stores as "
                f"{checkpoint.weights['lm_head'].format}; make the draft head first, then quantize the head"
            )
        found["mtp.lm_head"] = "nvfp4"
    if not found:
        raise UserError(
            f"{kind} finds nothing to convert in {checkpoint.directory}: `stepfloor inspect` shows the formats it has"
        )
    return found


def _refuse_odd_rows(name: str, form: str, checkpoint: Checkpoint) -> None:
    weight = checkpoint.weights["lm_head" if name == "mtp.lm_head" else name]
    group = FORMATS[form].group
    if group is not None and group[0] == 1 and weight.shape[-1] % group[1]:
        raise UserError(f"{form} stores rows of a multiple of {group[1]} values; {name} has rows of {weight.shape[-1]}")


@dataclass(slots=True)
class _Draft:
    """A tensor of a new file before its offset is known."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(slots=True)
class _FileDraft:
    """matrices: (canonical name, format, rows, drafts by suffix, shared); scalars: (canonical name, draft)."""

    copies: list[tuple[_Draft, Entry]] = field(default_factory=list)
    matrices: list[tuple[str, str, Rows, dict[str, _Draft], str | None]] = field(default_factory=list)
    scalars: list[tuple[str, _Draft]] = field(default_factory=list)

    def tensors(self) -> list[_Draft]:
        parts = [draft for _, _, _, drafts, _ in self.matrices for draft in drafts.values()]
        return [draft for draft, _ in self.copies] + parts + [draft for _, draft in self.scalars]


class _Build:
    """Files of the source, one after the other, turned into files of the result."""

    def __init__(self, checkpoint: Checkpoint, formats: dict[str, str]) -> None:
        self.checkpoint, self.formats = checkpoint, formats
        self.drafts: dict[str, _FileDraft] = {}
        self.stored: dict[str, str] = {}  # stored name -> file, of the result
        self.linked: list[str] = []
        self.prefix = ""  # of the text model's names, as the source spells it
        self.draft_prefix = "mtp."
        self.renamed = f"mtp.layers.{checkpoint.config.num_hidden_layers}."
        self.total = 0

    def take_files(self) -> None:
        table = self.checkpoint.table
        converts_table = f"{table.name}.shard_0" in self.formats
        shared_at: str | None = None
        for path in sorted(self.checkpoint.directory.glob("*.safetensors")):
            draft = _FileDraft()
            touched = False
            for stored, entry in read_header(path).entries.items():
                name, part = self._canonical(stored)
                if name == "embed_tokens":
                    self.prefix = stored.removesuffix("embed_tokens.weight")
                if name.startswith("mtp."):
                    self.draft_prefix = stored[: stored.index("mtp.") + 4]
                if name in self.formats and part == "weight":
                    self._convert(draft, name, stored, entry)
                    touched = True
                elif converts_table and name == table.name:
                    touched = True  # the one scale of the old format goes
                    shared_at = path.name
                else:
                    draft.copies.append((_Draft(stored, entry.dtype, entry.shape), entry))
            if converts_table and shared_at is None and f"{table.name}.shard_0" in {m[0] for m in draft.matrices}:
                shared_at = path.name
            if touched:
                self.drafts[path.name] = draft
            else:
                self.linked.append(path.name)
                self.stored.update((d.name, path.name) for d, _ in draft.copies)
                self.total += sum(d.nbytes for d, _ in draft.copies)
        if converts_table and shared_at is not None:
            name = f"{self.prefix}{table.name}.weight_scale_2"
            self.drafts[shared_at].scalars.append((table.name, _Draft(name, "F32", ())))

    def add_draft_head(self) -> None:
        head = self.checkpoint.weights["lm_head"].parts["weight"]
        draft = _FileDraft()
        n, k = self.checkpoint.weights["lm_head"].shape
        rows = Rows(head.file, head.dtype, head.offset, n, k)
        self._add(draft, "mtp.lm_head", "nvfp4", rows, f"{self.draft_prefix}lm_head")
        self.drafts[_DRAFT_HEAD_FILE] = draft

    def plan(self, kind: str, leave: tuple[str, ...]) -> Plan:
        files = tuple(self._lay_out(name, draft) for name, draft in self.drafts.items())
        for name, draft in self.drafts.items():
            self.stored.update((tensor.name, name) for tensor in draft.tensors())
            self.total += sum(tensor.nbytes for tensor in draft.tensors())
        source = _source_name(self.checkpoint.directory)
        sources = [
            [path.name, path.stat().st_size, path.stat().st_mtime_ns]
            for path in sorted(self.checkpoint.directory.glob("*.safetensors"))
        ]
        manifest = {
            "converter": {"name": "stepfloor", "revision": _REVISION},
            "conversion": kind,
            "left": list(leave),
            "source": source,
            "written": sorted(self.drafts),
            "linked": sorted(self.linked),
            "converted": dict(sorted(self.formats.items())),
        }
        documents = {
            "config.json": self._config(),
            INDEX: {
                "metadata": {"total_size": self.total},
                "weight_map": {name: self.stored[name] for name in sorted(self.stored)},
            },
            MANIFEST: manifest,
        }
        # the index, 32 MB of a release of single experts, follows from the headers
        told = [documents["config.json"], manifest, sources, [hashlib.blake2b(f.header).hexdigest() for f in files]]
        digest = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()
        # of what the source is, not of when its files were made: the same release gives the same name everywhere
        revision = (
            source["revision"]
            or hashlib.blake2b(json.dumps([s[:2] for s in sources]).encode(), digest_size=4).hexdigest()
        )
        snapshot = f"{kind.replace('-', '')}-{revision[:8]}" + "".join(f"-no{group}" for group in leave)
        return Plan(
            kind, self.checkpoint.directory, self.formats, files, tuple(self.linked), documents, digest, snapshot
        )

    def _canonical(self, stored: str) -> tuple[str, str]:
        name, part = split_name(stored)
        if name.startswith(self.renamed):
            name = "mtp.layers.0." + name[len(self.renamed) :]
        return name, part

    def _convert(self, draft: _FileDraft, name: str, stored: str, entry: Entry) -> None:
        form, base = self.formats[name], stored.removesuffix(".weight")
        if len(entry.shape) == 3:
            self._convert_fused(draft, name, base, entry)
            return
        table = self.checkpoint.table
        in_table = name.startswith(f"{table.name}.shard_")
        scale = table.scale.parts.get("weight_scale") if in_table and table.scale is not None else None
        n, k = entry.shape
        rows = Rows(entry.file, entry.dtype, entry.offset, n, k, scale)
        self._add(draft, name, form, rows, base, table.name if in_table else None)

    def _convert_fused(self, draft: _FileDraft, name: str, base: str, entry: Entry) -> None:
        """A stack of experts as one matrix each, the way quantized releases store them; gate rows before up rows."""
        block, _, leaf = base.rpartition(".")
        canonical = name.rpartition(".")[0]
        leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        experts, height, k = entry.shape
        n = height // len(leaves)
        matrix_bytes = n * k * DTYPE_BYTES[entry.dtype]
        for e in range(experts):
            for i, one in enumerate(leaves):
                offset = entry.offset + (e * len(leaves) + i) * matrix_bytes
                rows = Rows(entry.file, entry.dtype, offset, n, k)
                self._add(draft, f"{canonical}.{e}.{one}", self.formats[name], rows, f"{block}.{e}.{one}")

    def _add(self, draft: _FileDraft, name: str, form: str, rows: Rows, base: str, shared: str | None = None) -> None:
        layout = FORMATS[form]
        drafts = {"weight": _Draft(f"{base}.weight", layout.dtype, layout.weight_shape(rows.n, rows.k))}
        for companion in layout.companions:
            if companion.optional or (shared is not None and companion.suffix == "weight_scale_2"):
                continue
            drafts[companion.suffix] = _Draft(
                f"{base}.{companion.suffix}", companion.dtypes[0], companion.shape(rows.n, rows.k)
            )
        draft.matrices.append((name, form, rows, drafts, shared))

    def _lay_out(self, name: str, draft: _FileDraft) -> NewFile:
        # wide dtypes first keeps every tensor aligned, as the library's own writer does
        ordered = sorted(draft.tensors(), key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
        listed: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor in ordered:
            listed[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.nbytes],
            }
            at += tensor.nbytes
        text = json.dumps(listed, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text

        def place(tensor: _Draft) -> Place:
            return Place(tensor.dtype, tensor.shape, len(header) + listed[tensor.name]["data_offsets"][0])

        return NewFile(
            name,
            header,
            len(header) + at,
            tuple(
                Matrix(matrix, form, rows, {suffix: place(d) for suffix, d in drafts.items()}, shared)
                for matrix, form, rows, drafts, shared in draft.matrices
            ),
            tuple(Copied(d.name, entry, place(d).offset) for d, entry in draft.copies),
            tuple((scalar, place(d)) for scalar, d in draft.scalars),
        )

    def _config(self) -> dict[str, Any]:
        path = self.checkpoint.directory / "config.json"
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        text = dict(raw["text_config"]) if isinstance(raw.get("text_config"), dict) else raw
        text.pop("quantization_config", None)
        table = "nvfp4" if f"{self.checkpoint.table.name}.shard_0" in self.formats else self.checkpoint.table.format
        if table in _TABLE_DTYPES:
            text["ple_embedding_dtype"] = _TABLE_DTYPES[table]
        if text is not raw:
            raw = {**raw, "text_config": text}
        return {**raw, "quantization_config": self._quantization(raw, table)}

    def _quantization(self, raw: Mapping[str, Any], table: str) -> dict[str, Any]:
        """ModelOpt's mixed precision: every quantized module by name, everything else left to be bf16.

        Exclusions would be tested before this list, and by substring, so there are none. The drafter stands under its
        own layer number and under the one runtimes count it as.
        """
        layers: dict[str, dict[str, Any]] = {}
        experts = self._expert_algorithms()
        for name, form in self._stored_formats().items():
            block, inside, _ = name.partition(".mlp.experts.")
            if inside:
                for leaf in ("", ".gate_up_proj", ".down_proj"):
                    layers[self._spelled(f"{block}.mlp.experts{leaf}")] = experts.get(block, _ALGORITHMS[form])
            elif form in _ALGORITHMS:
                layers[self._spelled(name)] = _ALGORITHMS[form]
        if table in _ALGORITHMS:
            layers[self._spelled(self.checkpoint.table.name)] = _ALGORITHMS[table]
        runtime = f"{self.draft_prefix}layers.{self.checkpoint.config.num_hidden_layers}."
        drafted = f"{self.draft_prefix}layers.0."
        layers |= {runtime + n[len(drafted) :]: entry for n, entry in layers.items() if n.startswith(drafted)}
        kept = {key: value for key, value in self._old_section(raw).items() if key.startswith("kv_cache")}
        return {
            "quant_method": "modelopt_mixed",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": dict(sorted(layers.items())),
            "ignore": [],
            **kept,
        }

    def _old_section(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        section = raw.get("quantization_config")
        path = self.checkpoint.directory / "hf_quant_config.json"
        if not section and path.exists():
            section = json.loads(path.read_text(encoding="utf-8")).get("quantization")
        return section if isinstance(section, Mapping) else {}

    def _stored_formats(self) -> dict[str, str]:
        """Format of every matrix of the result by canonical name, without the table and what is plain."""
        table = self.checkpoint.table.name
        found = {
            name: self.formats.get(name, weight.format)
            for name, weight in self.checkpoint.weights.items()
            if not name.startswith(table)
        }
        found |= {name: form for name, form in self.formats.items() if not name.startswith(table)}
        return {name: form for name, form in found.items() if form in _ALGORITHMS}

    def _expert_algorithms(self) -> dict[str, dict[str, Any]]:
        """NVFP4 experts without activation scales are read with bf16 activations, whatever the source said."""
        without: dict[str, dict[str, Any]] = {}
        for name, weight in self.checkpoint.weights.items():
            block, inside, _ = name.partition(".mlp.experts.")
            if inside and weight.format == "nvfp4" and "input_scale" not in weight.parts:
                without[block] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
        return without

    def _spelled(self, name: str) -> str:
        if name.startswith("mtp."):
            return self.draft_prefix + name[len("mtp.") :]
        return name if name == "lm_head" else self.prefix + name


def converted_weight(checkpoint: Checkpoint, name: str) -> Weight:
    """The source's weight from which a converted one of this canonical name is made."""
    if name == "mtp.lm_head":
        return checkpoint.weights["lm_head"]
    if name in checkpoint.weights:
        return checkpoint.weights[name]
    block, _, _ = name.partition(".mlp.experts.")
    gate_up, down = fused_experts(checkpoint.config, f"{block}.mlp.experts")
    return checkpoint.weights[(down if name.endswith("down_proj") else gate_up).name]


def _source_name(directory: Path) -> dict[str, str | None]:
    """The repository and revision of a snapshot in a Hugging Face cache; of a plain directory neither."""
    resolved = directory.resolve()
    if resolved.parent.name == "snapshots" and resolved.parents[1].name.startswith("models--"):
        return {"repository": resolved.parents[1].name, "revision": resolved.name}
    return {"repository": None, "revision": None}
