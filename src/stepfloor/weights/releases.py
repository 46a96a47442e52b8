"""The layout of every release: which tensors lie in which file, in which format, under which metadata. No torch.

A layout is a checkpoint before it is written. `convert random` fills one with numbers; `floor` and `inspect` read one
in place of 126 GB of files.
Source: layouts, names and metadata of the `qwen4_exp` releases.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

from stepfloor.config import ModelConfig
from stepfloor.errors import UserError
from stepfloor.formats.table import DTYPE_BYTES, FORMATS
from stepfloor.weights.checkpoint import INDEX, Checkpoint, take_census
from stepfloor.weights.expected import (
    Expected,
    Shape,
    category,
    expected_weights,
    expert_blocks,
    fused_experts,
    shard_heights,
    single_experts,
    table_name,
)
from stepfloor.weights.headers import Entry, Header

LAYOUT_MODEL = "qwen3.8-flash-next"
_VISION_BYTES = 2 * 448_931_056  # bf16 in every release, and in no layout of ours: text is what we serve
_TEXT = "model.language_model."
_FILE_BYTES = 5_000_000_000
_GDN, _QSA, _HC, _SHARED = "gated delta net", "sparse attention", "hyper-connections", "shared experts"
_TABLE_DTYPES = {"fp8": "float8_e4m3fn", "nvfp4": "nvfp4"}
_TABLE_FORMATS = {"bf16": "bf16", "fp8": "fp8_tensor", "nvfp4": "nvfp4"}


@dataclass(frozen=True, slots=True)
class Release:
    """How one release stores each kind of tensor: names in formats.table.FORMATS.

    dense            format of the matrices whose category is in dense_kinds
    input_scale      whether NVFP4 matrices carry an activation scale
    announces_table  whether text_config.ple_embedding_dtype names the table's format
    table_file       file that holds the table and the drafter's experts, where they have one of their own
    """

    experts: str = "bf16"
    dense: str = "bf16"
    dense_kinds: tuple[str, ...] = ()
    head: str = "bf16"
    table: str = "bf16"
    draft_experts: str = "bf16"
    draft_dense: str = "bf16"
    input_scale: bool = False
    announces_table: bool = True
    table_file: str | None = None


RELEASES: dict[str, Release] = {
    "bf16": Release(),
    "fp8": Release(experts="fp8_block", table="fp8", draft_experts="fp8_block"),
    "nvfp4": Release(experts="nvfp4", table="fp8", input_scale=True),
    "nvidia-nvfp4": Release(
        experts="nvfp4",
        table="fp8",
        draft_experts="fp8_block",
        input_scale=True,
        announces_table=False,
        table_file="model-fp8-mtp-ple.safetensors",
    ),
    "mxfp8-nvfp4": Release(experts="nvfp4", dense="mxfp8", dense_kinds=(_GDN, _QSA, _SHARED), table="nvfp4"),
    "fp8dense": Release(
        experts="nvfp4",
        dense="fp8_channel",
        dense_kinds=(_GDN, _QSA, _HC, _SHARED),
        head="fp8_channel",
        table="fp8",
        input_scale=True,
    ),
    "fp8dense-mtp": Release(
        experts="nvfp4",
        dense="fp8_channel",
        dense_kinds=(_GDN, _QSA, _HC, _SHARED),
        head="fp8_channel",
        table="fp8",
        draft_experts="fp8_block",
        draft_dense="fp8_channel",
        input_scale=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file: its name there, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: Shape
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        # reckoned once: a release has 300,000 of these, and each is asked several times
        object.__setattr__(self, "nbytes", prod(self.shape) * DTYPE_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class Planned:
    """One logical tensor to write: what it is, in which format, and its stored parts by suffix."""

    expected: Expected
    format: str
    parts: dict[str, Stored]
    with_table: bool = False

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """A checkpoint before it is written: its JSON files and its safetensors files."""

    config: ModelConfig
    documents: dict[str, dict[str, Any]]
    files: dict[str, tuple[Planned, ...]]

    @property
    def nbytes(self) -> int:
        return sum(planned.nbytes for file in self.files.values() for planned in file)


def plan_random(
    like: str,
    release_name: str,
    *,
    table: str | None = None,
    layers: int | None = None,
    experts: int | None = None,
    table_rows: int | None = None,
    dtype: str = "bfloat16",
) -> Plan:
    """Decide every file and tensor of a random checkpoint; nothing is drawn or written.

    like        full, small, or the path of a config.json
    table       bf16, fp8 or nvfp4; None takes the release's own
    layers, experts, table_rows  cut the model down; table_rows is approximate (heads have prime sizes)
    dtype       bfloat16 or float32, of what the release leaves unquantized
    Raises UserError for a shape that a format cannot store.
    """
    if release_name not in RELEASES:
        raise UserError(f"--format must be one of {', '.join(RELEASES)}; got {release_name!r}")
    if dtype not in ("bfloat16", "float32"):
        raise UserError(f"--dtype must be bfloat16 or float32; got {dtype!r}")
    release = RELEASES[release_name]
    table = table or release.table
    if table not in _TABLE_FORMATS:
        raise UserError(f"--table must be bf16, fp8 or nvfp4; got {table!r}")
    raw = _cut(_like(like), layers, experts, table_rows)
    if release.announces_table and table != "bf16":
        raw["text_config"]["ple_embedding_dtype"] = _TABLE_DTYPES[table]
    raw["text_config"]["dtype"] = dtype
    config = ModelConfig.from_dict(raw, source=like)
    planned = list(_planned(config, release, table, "fp32" if dtype == "float32" else "bf16"))
    _refuse_odd_groups(planned)
    documents = _documents(raw, config, release_name, release, table, planned)
    files = _files(planned, release)
    documents[INDEX] = {
        "metadata": {"total_size": sum(p.nbytes for p in planned)},
        "weight_map": {s.name: file for file, weights in files.items() for p in weights for s in p.parts.values()},
    }
    return Plan(config, documents, files)


def open_layout(name: str) -> Checkpoint:
    """The census of a release's layout, as if its files were here; nothing is read but the package's own config.

    name  qwen3.8-flash-next:FORMAT, with a name in RELEASES. Raises UserError for another.
    """
    model, _, release = name.partition(":")
    if model.lower() != LAYOUT_MODEL or release not in RELEASES:
        known = ", ".join(f"{LAYOUT_MODEL}:{known}" for known in RELEASES)
        raise UserError(f"wanted a layout known to the package ({known}); got {name!r}")
    plan = plan_random("full", release)
    census = take_census(Path(name), plan.documents, _headers(plan), has_bytes=False)
    return replace(census, vision_bytes=_VISION_BYTES)


def is_layout(name: str) -> bool:
    """Whether a model's name has the form of a layout, known or not."""
    return name.lower().startswith(f"{LAYOUT_MODEL}:")


def _headers(plan: Plan) -> Iterator[Header]:
    for file, weights in plan.files.items():
        path, position = Path(file), 0
        entries: dict[str, Entry] = {}
        for stored in _in_file_order(weights):
            entries[stored.name] = Entry(path, stored.dtype, stored.shape, position, stored.nbytes)
            position += stored.nbytes
        yield Header(path, entries, ())


def layout(weights: tuple[Planned, ...]) -> tuple[bytes, dict[str, int]]:
    """The header of one safetensors file, length included, and each tensor's offset in the file."""
    stored = _in_file_order(weights)
    listed: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in stored:
        end = position + tensor.nbytes
        listed[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    offsets = {name: start + info["data_offsets"][0] for name, info in listed.items() if name != "__metadata__"}
    return len(text).to_bytes(8, "little") + text, offsets


def _in_file_order(weights: tuple[Planned, ...]) -> list[Stored]:
    # wide dtypes first keeps every tensor aligned, as the library's own writer does
    return sorted((s for p in weights for s in p.parts.values()), key=lambda s: -DTYPE_BYTES[s.dtype])


def _like(like: str) -> dict[str, Any]:
    if like in ("full", "small"):
        name = "full_config.json" if like == "full" else "config.json"
        text = resources.files("stepfloor").joinpath("shipped", name).read_text(encoding="utf-8")
    else:
        try:
            text = Path(like).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"--like wants full, small or a config.json; {like}: {error.strerror}") from None
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise UserError(f"{like} is not valid JSON ({error})") from None
    ModelConfig.from_dict(raw, source=like)
    if "text_config" not in raw:
        raw = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "text_config": raw}
    # what is made here has no vision tower, and the source's quantization is not ours
    for section in (raw, raw["text_config"]):
        section.pop("quantization_config", None)
    raw["text_config"].pop("ple_embedding_dtype", None)
    return {**raw, "language_model_only": True}


def _cut(raw: dict[str, Any], layers: int | None, experts: int | None, table_rows: int | None) -> dict[str, Any]:
    config, text = ModelConfig.from_dict(raw), dict(raw["text_config"])
    if layers is not None:
        if not config.ple_layer < layers <= config.num_hidden_layers:
            raise UserError(
                f"--layers must be {config.ple_layer + 1} (the n-gram layer is number {config.ple_layer + 1}) to "
                f"{config.num_hidden_layers}; got {layers}"
            )
        text |= {"num_hidden_layers": layers, "layer_types": list(config.layer_types[:layers])}
    if experts is not None:
        if not 1 <= experts <= config.num_experts:
            raise UserError(f"--experts must be 1 to {config.num_experts}; got {experts}")
        text |= {"num_experts": experts, "num_experts_per_tok": min(config.num_experts_per_tok, experts)}
    if table_rows is not None:
        base = table_rows // config.ngram_heads
        if base < 2:
            raise UserError(f"--table-rows must be at least {2 * config.ngram_heads}; got {table_rows}")
        text |= {"ngram_vocab_size_base": base, "split_ngram_parts": min(config.split_ngram_parts, base)}
    return {**raw, "text_config": text}


def _planned(config: ModelConfig, release: Release, table: str, plain: str) -> Iterator[Planned]:
    drafter = config.has_drafter
    for expected in expected_weights(config, drafter).values():
        yield _plan_one(expected, _dense_format(expected, release, plain), release)
    for block in expert_blocks(config, drafter):
        format_name = release.draft_experts if block.startswith("mtp.") else release.experts
        if format_name == "bf16":
            for expected in fused_experts(config, block):
                yield Planned(
                    expected, plain, {"weight": Stored(_stored(expected.name), _dtype(plain), expected.shape)}
                )
        else:
            own_file = block.startswith("mtp.")
            for expected in single_experts(config, block):
                yield _plan_one(expected, format_name, release, own_file)
    yield from _planned_table(config, _TABLE_FORMATS[table], plain)


def _dense_format(expected: Expected, release: Release, plain: str) -> str:
    if expected.kind == "buffer":
        return "int64"
    if expected.kind != "linear":
        return plain
    draft = expected.name.startswith("mtp.layers.0.")
    kind = category(expected.name.removeprefix("mtp."))
    quantized = kind in release.dense_kinds and not expected.name.endswith(("in_proj_a", "in_proj_b"))
    format_name = release.head if kind == "lm_head" else "bf16"
    if quantized and (draft or not expected.name.startswith("mtp.")):
        format_name = release.draft_dense if draft else release.dense
    return plain if format_name == "bf16" else format_name


def _dtype(format_name: str) -> str:
    return "I64" if format_name == "int64" else FORMATS[format_name].dtype


def _stored(canonical: str, suffix: str | None = None) -> str:
    """The name in a file: the drafter and the head stand outside the language model."""
    prefix = "" if canonical.startswith(("mtp.", "lm_head")) else _TEXT
    return prefix + canonical + (f".{suffix}" if suffix else "")


_BARE = ("A_log", "dt_bias", "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def _plan_one(expected: Expected, format_name: str, release: Release, with_table: bool = False) -> Planned:
    suffix = None if expected.name.endswith(_BARE) else "weight"
    if format_name in ("bf16", "fp32", "int64"):
        stored = Stored(_stored(expected.name, suffix), _dtype(format_name), expected.shape)
        return Planned(expected, format_name, {"weight": stored}, with_table)
    n, k = expected.shape
    form = FORMATS[format_name]
    parts = {"weight": Stored(_stored(expected.name, "weight"), form.dtype, form.weight_shape(n, k))}
    for companion in form.companions:
        if not companion.optional or release.input_scale:
            name = _stored(expected.name, companion.suffix)
            parts[companion.suffix] = Stored(name, companion.dtypes[0], companion.shape(n, k))
    return Planned(expected, format_name, parts, with_table)


def _planned_table(config: ModelConfig, format_name: str, plain: str) -> Iterator[Planned]:
    base, width, form = table_name(config), config.ngram_head_dim, FORMATS[format_name]
    format_name = plain if format_name == "bf16" else format_name
    for i, height in enumerate(shard_heights(config)):
        expected = Expected(f"{base}.shard_{i}", (height, width), "linear")
        parts = {
            "weight": Stored(_stored(expected.name, "weight"), _dtype(format_name), form.weight_shape(height, width))
        }
        if format_name == "nvfp4":
            parts["weight_scale"] = Stored(_stored(expected.name, "weight_scale"), "F8_E4M3", (height, width // 16))
        yield Planned(expected, format_name, parts, with_table=True)
    shared = {
        "fp8_tensor": {"weight_scale": Stored(_stored(base, "weight_scale"), "BF16", (1,))},
        "nvfp4": {"weight_scale_2": Stored(_stored(base, "weight_scale_2"), "F32", ())},
    }
    if format_name in shared:
        yield Planned(Expected(base, (1,), "plain"), format_name, shared[format_name], with_table=True)


def _refuse_odd_groups(planned: list[Planned]) -> None:
    for p in planned:
        group = FORMATS[p.format].group if p.format in FORMATS else None
        if group is not None and group[0] == 1 and p.expected.shape[-1] % group[1] and "weight" in p.parts:
            raise UserError(
                f"{p.format} stores rows of a multiple of {group[1]} values; {p.expected.name} has rows of "
                f"{p.expected.shape[-1]}; choose another --format or --table, or another config"
            )


def _files(planned: list[Planned], release: Release) -> dict[str, tuple[Planned, ...]]:
    own = [p for p in planned if p.with_table] if release.table_file else []
    rest = [p for p in planned if not (release.table_file and p.with_table)]
    files: list[list[Planned]] = [[]]
    filled = 0
    for p in rest:
        if filled + p.nbytes > _FILE_BYTES and files[-1]:
            files.append([])
            filled = 0
        files[-1].append(p)
        filled += p.nbytes
    named = {f"model-{i + 1:05d}-of-{len(files):05d}.safetensors": tuple(file) for i, file in enumerate(files)}
    return named | ({release.table_file: tuple(own)} if release.table_file else {})


def _documents(
    raw: dict[str, Any],
    config: ModelConfig,
    name: str,
    release: Release,
    table: str,
    planned: list[Planned],
) -> dict[str, dict[str, Any]]:
    documents: dict[str, dict[str, Any]] = {"config.json": raw}
    section = _quantization(config, name, release, table, planned)
    if section and name == "nvidia-nvfp4":
        documents["hf_quant_config.json"] = {"producer": {"name": "modelopt"}, "quantization": section}
    elif section:
        documents["config.json"] = {**raw, "quantization_config": section}
    # <|im_end|> ends a chat turn in the release's vocabulary; smaller ones have their eos alone
    stops = [248046, config.eos_token_id] if config.eos_token_id == 248044 else [config.eos_token_id]
    documents["generation_config.json"] = {
        "bos_token_id": config.eos_token_id,
        "eos_token_id": stops,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }
    return documents


_RADIXARK_IGNORE = [
    "model.language_model.embed_tokens",
    "lm_head",
    "mtp.*",
    "model.mtp.*",
    "*.self_attn.*",
    "*.linear_attn.*",
    "*.mlp.gate*",
    "*.mlp.shared_expert.*",
    "*.mlp.shared_expert_gate*",
    "*hyper_connection*",
    "*.ple.*",
    "model.visual.*",
]


def _quantization(
    config: ModelConfig, name: str, release: Release, table: str, planned: list[Planned]
) -> dict[str, Any] | None:
    """The metadata of a release, with its own habits: what it lists twice, and what it contradicts."""
    matrices = [p for p in planned if p.expected.kind == "linear" and not p.with_table]
    dense = [p for p in matrices if ".mlp.experts." not in p.expected.name]
    table_entry = {_stored(table_name(config)): {"quant_algo": "FP8"}} if table == "fp8" else {}
    main = [_stored(block) for block in expert_blocks(config, drafter=False)]
    nvfp4, block = {"quant_algo": "NVFP4", "group_size": 16}, {"quant_algo": "FP8_PB_WO", "group_size": 128}
    if name == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [_stored(p.expected.name) for p in dense],
            "modules_to_convert": list(table_entry),
        }
    if name == "nvfp4":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": _RADIXARK_IGNORE}
    if name == "nvidia-nvfp4":
        drafter = {"mtp.layers.0.mlp.experts": block} if config.has_drafter else {}
        layers = dict.fromkeys(main, nvfp4) | table_entry | drafter
        return {"quant_algo": "MIXED_PRECISION", "exclude_modules": [], "quantized_layers": layers}
    if name == "mxfp8-nvfp4":
        entry = {"quant_algo": "MXFP8", "group_size": 32}
        layers = dict.fromkeys(main, nvfp4) | {_stored(p.expected.name): entry for p in dense if p.format == "mxfp8"}
        return {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    if name in ("fp8dense", "fp8dense-mtp"):
        spelled = [m + leaf for m in main for leaf in ("", ".gate_up_proj", ".down_proj")]
        entry = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
        layers = dict.fromkeys(spelled, nvfp4)
        layers |= {_stored(p.expected.name): entry for p in dense if p.format == "fp8_channel"}
        if release.draft_experts == "fp8_block" and config.has_drafter:
            layers |= {f"mtp.layers.{i}.mlp.experts": block for i in (0, config.num_hidden_layers)}
        return {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return None
