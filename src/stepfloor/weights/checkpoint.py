"""Open a checkpoint: every tensor of every release counted once, from headers alone, before a byte is loaded.

Formats are decided by dtypes and companion scales. All faults of all files come in one UserError, a sentence
each, so that a broken export is repaired in one round.
Source: tensor lists and layouts of the `qwen4_exp` releases (bf16, Qwen FP8, the NVFP4 family, FP8 dense).
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from stepfloor.config import ModelConfig
from stepfloor.errors import UserError
from stepfloor.weights.expected import (
    VISION_PREFIXES,
    Expected,
    Shape,
    draft_head,
    expected_weights,
    expert_blocks,
    fused_experts,
    hash_buffers,
    is_ignored,
    shard_heights,
    single_experts,
    split_name,
    table_name,
)
from stepfloor.weights.headers import Entry, Header, read_header
from stepfloor.weights.layouts import scale_fault, shard_faults, stored_format
from stepfloor.weights.metadata import Module, Precision, cross_check, read_metadata, table_format

INDEX = "model.safetensors.index.json"
# the JSON files a census reads
DOCUMENTS = ("config.json", "hf_quant_config.json", "generation_config.json", "tokenizer_config.json", INDEX)
_TABLE_FORMATS = {"BF16": "bf16", "F32": "fp32", "F8_E4M3": "fp8_tensor", "U8": "nvfp4"}
# what all shards share, by format: suffix and dtypes
_TABLE_SCALES = {"fp8_tensor": ("weight_scale", ("BF16", "F32")), "nvfp4": ("weight_scale_2", ("F32",))}


@dataclass(frozen=True, slots=True)
class Weight:
    """One logical tensor of the model.

    name    canonical, e.g. layers.3.self_attn.q_proj
    shape   logical, e.g. (N, K) for a matrix whatever its format stores
    format  name in formats.table.FORMATS, or int64 for the hash buffers
    parts   the stored tensors by suffix: weight, weight_scale, weight_scale_inv, weight_scale_2, input_scale
    """

    name: str
    shape: Shape
    format: str
    parts: dict[str, Entry]

    @property
    def num_bytes(self) -> int:
        """Stored bytes, scales included."""
        return sum(entry.nbytes for entry in self.parts.values())


@dataclass(frozen=True, slots=True)
class Table:
    """Geometry of the n-gram table.

    name           canonical; shard i is the Weight `<name>.shard_<i>`, starting at row i * shard_rows
    rows, width    logical shape
    shard_rows     rows of every shard but the last; heights  rows of each
    format         bf16, fp32, fp8_tensor (one scale for all shards) or nvfp4 (block scales beside each shard)
    scale          what all shards share: the Weight `<name>` with part weight_scale (fp8_tensor) or
                   weight_scale_2 (nvfp4); None for bf16 and fp32
    row_bytes      bytes one row takes in the files
    """

    name: str
    rows: int
    width: int
    shard_rows: int
    heights: tuple[int, ...]
    format: str
    scale: Weight | None
    row_bytes: int

    def locate(self, row: int) -> tuple[int, int]:
        """(shard, row inside it) of a table row."""
        return divmod(row, self.shard_rows)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth saying that does not stop the load."""

    kind: Literal["metadata", "index", "drafter", "files"]
    message: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose census found no fault.

    weights            by canonical name
    precisions         stored format of each group of modules and the metadata rule that claims it
    stop_token_ids     ids that end a turn: generation_config.json's, else the tokenizer's and config's
    vision_bytes       bytes of the vision tower, which is not loaded; ignored_bytes of tensors nothing reads
    """

    directory: Path
    config: ModelConfig
    weights: dict[str, Weight]
    table: Table
    findings: tuple[Finding, ...]
    precisions: tuple[Precision, ...]
    has_drafter: bool
    generation_config: dict[str, Any]
    stop_token_ids: tuple[int, ...]
    vision_bytes: int
    ignored_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of everything the model reads: all weights, hash buffers included, vision tower left out."""
        return sum(weight.num_bytes for weight in self.weights.values())


def open_checkpoint(directory: str | Path, *, hf_overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Count and check every tensor in a checkpoint directory, reading headers and a few scalars only.

    hf_overrides replaces keys of the text config (vLLM's name). Raises UserError that lists every fault at once.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"wanted a checkpoint directory; {directory} is none; pass a directory or a Hugging Face id")
    ModelConfig.load(directory, hf_overrides)  # its sentences for an absent or broken config.json
    documents = {name: _json(directory / name) for name in DOCUMENTS if (directory / name).exists()}
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise UserError(f"wanted *.safetensors files; {directory} has none; fetch the checkpoint again")
    return take_census(directory, documents, map(read_header, paths), hf_overrides=hf_overrides)


def take_census(
    directory: Path,
    documents: Mapping[str, Mapping[str, Any]],
    headers: Iterable[Header],
    *,
    hf_overrides: Mapping[str, Any] | None = None,
    has_bytes: bool = True,
) -> Checkpoint:
    """The same for headers that came from anywhere.

    directory  or the name it is known by, for messages
    documents  parsed JSON files by name, those of DOCUMENTS that there are; config.json must be one
    headers    gone through once, none kept: the names of a release of single experts take 41 MB
    has_bytes  False where tensors cannot be read (a layout, a hub's headers): their values are then not checked
    """
    raw = documents["config.json"]
    config = ModelConfig.from_dict(raw, source=str(directory / "config.json"), hf_overrides=hf_overrides)
    section = read_metadata(raw, documents.get("hf_quant_config.json", {}))
    census = _Census(config, _index(directory, documents), has_bytes)
    weights = census.take(headers)
    faults = census.faults
    table = census.table
    text = dict(raw.get("text_config") or raw) | dict(hf_overrides or {})
    table_dtype = text.get("ple_embedding_dtype")
    if table is not None and "ple_embedding_dtype" in (hf_overrides or {}):
        faults += _wrong_override(str(table_dtype), table)
    if faults or table is None:
        raise UserError(_report(directory, faults))
    modules = list(_modules(weights, table))
    vectors = [name for name, weight in weights.items() if len(weight.shape) != 2 and ".mlp.experts." not in name]
    skipped = [*vectors, "model.visual.blocks", "visual"]
    table_claim = str(table_dtype) if table_dtype is not None else None
    precisions, notes = cross_check(section, modules, table_claim, table.name, skipped)
    findings = [*census.findings, *(Finding("metadata", note) for note in _collapse(notes))]
    generation = dict(documents.get("generation_config.json", {}))
    return Checkpoint(
        directory=directory,
        config=config if census.drafter else replace(config, mtp_num_hidden_layers=0),
        weights=weights,
        table=table,
        findings=tuple(findings),
        precisions=precisions,
        has_drafter=census.drafter,
        generation_config=generation,
        stop_token_ids=_stop_token_ids(generation, raw, documents.get("tokenizer_config.json", {})),
        vision_bytes=census.vision_bytes,
        ignored_bytes=census.ignored_bytes,
    )


class _Census:
    """One pass over the headers of one checkpoint; faults and findings gather as it goes."""

    def __init__(self, config: ModelConfig, index: Mapping[str, Any] | None, has_bytes: bool) -> None:
        self.config = config
        self.has_bytes = has_bytes
        self.index = index
        self.faults: list[str] = []
        self.findings: list[Finding] = []
        self.vision_bytes = 0
        self.ignored_bytes = 0
        self.table: Table | None = None
        self.drafter = config.has_drafter
        self.found: dict[str, dict[str, Entry]] = {}
        self.readable: dict[str, bool] = {}  # each file: could its header be read
        self.lost: set[str] | None = None

    def take(self, headers: Iterable[Header]) -> dict[str, Weight]:
        against = _AgainstIndex(self.index)
        doubled: list[str] = []
        for header in headers:
            self.readable[header.file.name] = header.readable
            self.faults += header.faults
            doubled += self._gather(header)
            against.take(header)
        self.lost = self._lost()
        self.faults += doubled
        self._check_index(against)
        self._settle_drafter()
        weights: dict[str, Weight] = {}
        for expected in expected_weights(self.config, self.drafter).values():
            self._take_one(weights, expected)
        if self.drafter and "mtp.lm_head" in self.found:
            self._take_one(weights, draft_head(self.config))
        for block in expert_blocks(self.config, self.drafter):
            self._take_experts(weights, block)
        self._take_table(weights)
        for name, parts in self.found.items():
            file = next(iter(parts.values())).file.name
            self.faults.append(
                f"{name} ({file}) is no tensor of this model; remove it, or check that config.json fits these files"
            )
        if not self.faults and self.has_bytes:
            self._compare_hash(weights)
            self._question_scales(weights)
        return weights

    def _gather(self, header: Header) -> list[str]:
        """Stored names to canonical ones; skip what is not read; returns a sentence for what is stored twice."""
        renamed = f"mtp.layers.{self.config.num_hidden_layers}."
        doubled: list[str] = []
        for stored, entry in header.entries.items():
            if stored.startswith(VISION_PREFIXES):
                self.vision_bytes += entry.nbytes
                continue
            name, part = split_name(stored)
            if is_ignored(name):
                self.ignored_bytes += entry.nbytes
                continue
            if name.startswith(renamed):
                name = "mtp.layers.0." + name[len(renamed) :]
            parts = self.found.setdefault(name, {})
            if (first := parts.setdefault(part, entry)) is not entry:
                doubled.append(
                    f"{name}: {part} is stored twice, in {first.file.name} and {entry.file.name}; remove one"
                )
        return doubled

    def _check_index(self, against: "_AgainstIndex") -> None:
        if self.index is None:
            return
        lost = sorted(set(self.index["weight_map"].values()) - set(self.readable))
        self.faults += [f"{file} is named by {INDEX} but not there; fetch it again" for file in lost]
        self.faults += against.faults()
        metadata = self.index.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, int) and total != against.nbytes and not self.faults:
            self.findings.append(Finding("index", f"{INDEX} says {total} bytes; the headers hold {against.nbytes}"))

    def _settle_drafter(self) -> None:
        stored = [name for name in self.found if name.startswith("mtp.")]
        if self.config.has_drafter and not stored and not self._excused("mtp"):
            self.drafter = False
            self.findings.append(
                Finding("drafter", "config.json promises a drafter but no file holds mtp.*; speculation is off")
            )
        elif stored and not self.config.has_drafter:
            self.faults.append(
                f"config.json says mtp_num_hidden_layers 0 but the files hold {len(stored)} mtp.* tensors; set it to 1 "
                "or remove them"
            )
            for name in stored:
                del self.found[name]

    def _excused(self, name: str) -> bool:
        """Whether a tensor's absence follows from a file that is broken or gone, which is reported already."""
        return self.lost is None or name in self.lost

    def _lost(self) -> set[str] | None:
        """Names, with all their parents, that such files hold by the index; None: anything may be in one."""
        broken = {file for file, readable in self.readable.items() if not readable}
        if self.index is None:
            absent = _absent_files(list(self.readable))
            self.faults += [f"{file} is not there, though its neighbours count it; fetch it" for file in absent]
            return None if broken or absent else set()
        gone = broken | set(self.index["weight_map"].values()) - set(self.readable)
        lost: set[str] = set()
        for stored, file in self.index["weight_map"].items():
            if file in gone:
                name, part = split_name(stored)
                lost.add(f"{name}.{part}")
                while name not in lost and name:
                    lost.add(name)
                    name = name.rpartition(".")[0]
        return lost

    def _missing(self, name: str, wanted: str) -> None:
        if not self._excused(name):
            self.faults.append(f"{name} is missing: wanted {wanted}; no file has it; fetch or export it again")

    def _take_one(self, weights: dict[str, Weight], expected: Expected) -> None:
        parts = self.found.pop(expected.name, None)
        if parts is None:
            self._missing(expected.name, str(list(expected.shape)))
            return
        format_name, faults = stored_format(expected, parts)
        self.faults += faults
        if format_name is not None:
            weights[expected.name] = Weight(expected.name, expected.shape, format_name, parts)

    def _take_experts(self, weights: dict[str, Weight], block: str) -> None:
        fused, single = fused_experts(self.config, block), single_experts(self.config, block)
        have_fused = [e.name for e in fused if e.name in self.found]
        have_single = [e.name for e in single if e.name in self.found]
        if have_fused and have_single:
            self.faults.append(
                f"{block} is stored twice: fused ({', '.join(n.rpartition('.')[2] for n in have_fused)}) and as "
                f"{len(have_single)} matrices per expert; remove one"
            )
            for name in (*have_fused, *have_single):
                del self.found[name]
        elif have_fused or have_single:
            for expected in fused if have_fused else single:
                self._take_one(weights, expected)
        else:
            e = self.config.num_experts
            self._missing(block, f"gate_up_proj and down_proj, or gate_proj, up_proj and down_proj of {e} experts")

    def _take_table(self, weights: dict[str, Weight]) -> None:
        base, heights, width = table_name(self.config), shard_heights(self.config), self.config.ngram_head_dim
        shared = self.found.pop(base, {})
        prefix = f"{base}.shard_"
        shards = {name: self.found.pop(name) for name in list(self.found) if name.startswith(prefix)}
        names = [f"{prefix}{i}" for i in range(len(heights))]
        whole = shared.pop("weight", None)
        if whole is not None and shards:
            self.faults.append(f"{base} is stored twice: whole and in {len(shards)} shards; remove one")
            return
        if whole is not None:
            if whole.shape != (sum(heights), width):
                wanted = [sum(heights), width]
                self.faults.append(
                    f"{base}: wanted {wanted} by config.json; found {list(whole.shape)} in {whole.file.name}; check "
                    "ngram_vocab_size_base, or export it again"
                )
                return
            starts = [sum(heights[:i]) for i in range(len(heights))]
            shards = {
                name: {"weight": whole.rows(start, start + height)}
                for name, start, height in zip(names, starts, heights, strict=True)
            }
        dtypes = {parts["weight"].dtype for parts in shards.values() if "weight" in parts}
        if len(dtypes) > 1:
            self.faults.append(
                f"{base}: wanted one dtype in all shards; found {', '.join(sorted(dtypes))}; export again"
            )
            return
        if not shards or not set(shards) <= set(names):
            if not self._excused(base):
                self.faults.append(
                    f"{base}: wanted {len(heights)} shards of {heights[0]} rows by config.json (split_ngram_parts "
                    f"{self.config.split_ngram_parts}, {sum(heights)} rows); found {len(shards)} shards; check "
                    "split_ngram_parts and ngram_vocab_size_base, or fetch the table again"
                )
            return
        format_name = _TABLE_FORMATS.get(dtypes.pop(), "") if dtypes else ""
        self._take_shards(weights, names, heights, shards, format_name)
        scale = self._table_scale(base, shared, format_name)
        if scale is not None:
            weights[base] = scale
        if all(name in weights for name in names):
            row_bytes = weights[names[0]].num_bytes // heights[0]
            self.table = Table(base, sum(heights), width, heights[0], heights, format_name, scale, row_bytes)

    def _take_shards(
        self,
        weights: dict[str, Weight],
        names: list[str],
        heights: tuple[int, ...],
        shards: dict[str, dict[str, Entry]],
        format_name: str,
    ) -> None:
        width = self.config.ngram_head_dim
        for name, height in zip(names, heights, strict=True):
            parts = shards.get(name)
            if parts is None or "weight" not in parts:
                self._missing(name, str([height, width]))
                continue
            faults = shard_faults(name, (height, width), parts, format_name)
            self.faults += faults
            if not faults:
                weights[name] = Weight(name, (height, width), format_name, parts)

    def _table_scale(self, base: str, shared: dict[str, Entry], format_name: str) -> Weight | None:
        suffix, dtypes = _TABLE_SCALES.get(format_name, ("", ()))
        for part, entry in shared.items():
            if part != suffix:
                self.faults.append(
                    f"{base}.{part} ({entry.file.name}) is a scale that a table of {format_name or 'this type'} does "
                    "not use; export the table again"
                )
        if not suffix:
            return None
        entry = shared.get(suffix)
        if entry is None:
            self._missing(f"{base}.{suffix}", f"the one {' or '.join(dtypes)} scale of the {format_name} table")
            return None
        if entry.dtype not in dtypes or prod(entry.shape) != 1:
            self.faults.append(
                f"{base}.{suffix}: wanted one {' or '.join(dtypes)} value; found {entry.dtype} {list(entry.shape)} in "
                f"{entry.file.name}; export the table again"
            )
        return Weight(base, (1,), format_name, {suffix: entry})

    def _compare_hash(self, weights: dict[str, Weight]) -> None:
        for name, wanted in hash_buffers(self.config).items():
            stored = tuple(weights[name].parts["weight"].read().cast("q"))
            if stored != wanted:
                i = next(i for i, (a, b) in enumerate(zip(stored, wanted, strict=True)) if a != b)
                self.faults.append(
                    f"{name}[{i}]: config.json implies {wanted[i]}; the file stores {stored[i]}; all n-gram rows would "
                    "differ; check seed, ngram_vocab_size_base and vocab_size, or fetch the checkpoint again"
                )

    def _question_scales(self, weights: dict[str, Weight]) -> None:
        """Per-tensor scales that can only be divisors, or nothing: one matrix of each group is looked at."""
        seen: set[str] = set()
        for name, weight in weights.items():
            for part, entry in weight.parts.items():
                if entry.dtype not in ("F32", "BF16") or part in ("weight", "input_scale"):
                    continue
                key = re.sub(r"experts\.\d+", "experts", name) + part
                if key in seen:
                    continue
                seen.add(key)
                if fault := scale_fault(name, part, entry):
                    self.faults.append(fault)


class _AgainstIndex:
    """What the index says against the headers, one header at a time; of a header only what differs is kept."""

    def __init__(self, index: Mapping[str, Any] | None) -> None:
        self.listed: Mapping[str, str] = {} if index is None else index["weight_map"]
        self.promised = Counter(self.listed.values())
        self.nbytes = 0  # of all headers
        self._lacking: list[tuple[str, str]] = []  # (name, file the index puts it in)
        self._elsewhere: dict[str, str] = {}  # name -> file that has it, the index naming another
        self._extra: list[str] = []

    def take(self, header: Header) -> None:
        self.nbytes += sum(entry.nbytes for entry in header.entries.values())
        if not header.readable:
            return
        file, kept = header.file.name, 0
        extra: list[str] = []
        for name in header.entries:
            said = self.listed.get(name)
            if said is None:
                extra.append(name)
            elif said == file:
                kept += 1
            else:
                self._elsewhere[name] = file
        if kept < self.promised[file]:
            self._lacking += [(n, f) for n, f in self.listed.items() if f == file and n not in header.entries]
        if len(extra) == len(header.entries) and extra:
            self._extra.append(f"{file} is not named by {INDEX}; remove it, or fetch the index again")
        else:
            self._extra += [f"{name} ({file}) is not listed in {INDEX}; fetch the index again" for name in extra]

    def faults(self) -> list[str]:
        found: list[str] = []
        for name, file in self._lacking:
            elsewhere = f"it is in {self._elsewhere[name]}" if name in self._elsewhere else "no file has it"
            found.append(f"{INDEX} puts {name} in {file}, whose header lacks it ({elsewhere}); fetch both again")
        return found + self._extra


def _modules(weights: Mapping[str, Weight], table: Table) -> Iterable[Module]:
    """What metadata can name: each matrix, each layer's experts as one, the table as one."""
    blocks: dict[str, None] = {}
    for name, weight in weights.items():
        head, experts, _ = name.partition(".mlp.experts.")
        if experts:
            block = f"{head}.mlp.experts"
            if block not in blocks:
                blocks[block] = None
                aliases = tuple(
                    f"{block}.{leaf}" for leaf in ("gate_up_proj", "down_proj", "0.gate_proj", "0.down_proj")
                )
                yield Module(block, weight.format, True, aliases)
        elif name == table.name or name.startswith(f"{table.name}.shard_"):
            continue
        elif len(weight.shape) == 2:
            plain = name.endswith((".mlp.gate", ".shared_expert_gate")) or name == "embed_tokens"
            yield Module(name, weight.format, not plain)
    yield Module(table.name, table.format, False, (f"{table.name}.shard_0",))


def _absent_files(names: list[str]) -> list[str]:
    """Files that `name-00001-of-00004.safetensors` promises and the directory lacks."""
    promised: list[str] = []
    for name in names:
        if numbered := re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\.safetensors)", name):
            stem, number, of, count, end = numbered.groups()
            promised += [f"{stem}{i + 1:0{len(number)}}{of}{count}{end}" for i in range(int(count))]
    return sorted(set(promised) - set(names))


def _wrong_override(announced: str, table: Table) -> list[str]:
    if table_format(announced) == table.format:
        return []
    return [
        f"ple_embedding_dtype {announced!r} was passed, but the headers hold a {table.format} table; leave it out, the "
        "headers decide"
    ]


def _index(directory: Path, documents: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    index = documents.get(INDEX)
    if index is None:
        return None
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise UserError(
            f"{directory / INDEX}: wanted a weight_map of names to files; found {sorted(index)}; fetch it again"
        )
    for name, file in names.items():
        names[name] = sys.intern(file)  # json makes a string of each mention: 28 MB for 296,000 tensors in 28 files
    return index


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: wanted a JSON object; found {type(value).__name__}; fetch it again")
    return value


def _stop_token_ids(
    generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Mapping[str, Any]
) -> tuple[int, ...]:
    if ids := _ids(generation.get("eos_token_id")):
        return ids
    # the config's id alone is the n-gram segment token, which ends no chat turn; the tokenizer's does
    eos, added = tokenizer.get("eos_token"), tokenizer.get("added_tokens_decoder")
    content = eos.get("content") if isinstance(eos, dict) else eos
    named = added.items() if isinstance(added, dict) and content is not None else ()
    ids = tuple(
        int(i) for i, token in named if isinstance(token, dict) and token.get("content") == content and i.isdecimal()
    )
    for source in (config, config.get("text_config") or {}):
        ids += tuple(i for i in _ids(source.get("eos_token_id")) if i not in ids)
    return ids


def _ids(value: Any) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [value]
    return tuple(i for i in listed if type(i) is int)


def _report(directory: Path, faults: list[str]) -> str:
    lines = _collapse(faults)
    if len(faults) == 1:
        return f"{directory}: {lines[0]}"
    return f"{directory} has {len(faults)} faults:\n" + "\n".join(f"  - {line}" for line in lines)


def _collapse(sentences: Iterable[str]) -> list[str]:
    """Three of a kind stand for all: sentences that differ in numbers only are counted after the third."""
    groups: dict[str, list[str]] = {}
    for sentence in sentences:
        groups.setdefault(re.sub(r"\d+", "#", sentence), []).append(sentence)
    lines: list[str] = []
    for group in groups.values():
        lines += group[:3] if len(group) > 4 else group
        if len(group) > 4:
            lines.append(f"... and {len(group) - 3} more that differ from the last in numbers only")
    return lines
