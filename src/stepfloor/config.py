"""What the checkpoint is (ModelConfig) and what the user asked of the engine (EngineConfig).

Source: config.json of the `qwen4_exp` releases; defaults of transformers 5.24, Qwen4ExpTextConfig. Every
dimension the engine relies on is checked here once, refused with a sentence, and trusted afterwards.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from stepfloor.errors import UserError

LINEAR, SPARSE = "linear_attention", "full_attention"
_SPARSE_ALIASES = ("full_attention", "indexed_attention", "qwen_sparse_attention")
_MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first `dim` values of a head.

    theta            base of the frequencies
    factor           YaRN context factor; 1.0 is plain rotary embedding
    original_tokens  context the model was trained with, the length YaRN stretches
    """

    theta: float
    dim: int
    factor: float = 1.0
    original_tokens: int = 0


@dataclass(frozen=True, slots=True)
class NgramHash:
    """Constants of the n-gram hash, int64 in the checkpoint: row = (xor of id * multiplier) mod size + offset.

    multipliers [ngram_size], index = lag (0 is the current token); sizes and offsets [heads]; rows is the
    height of the stored table, padding included.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one `qwen4_exp` text model; names are those of config.json."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    rms_norm_eps: float
    hc_count: int
    hc_lowrank: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    output_gate_type: str
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: Rope
    max_position_embeddings: int
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    ple_layer: int  # zero-based; config.json counts from one
    ple_embed_dim: int
    ple_conv_kernel_size: int
    ngram_size: int
    heads_per_ngram: int
    ngram_vocab_size_base: int
    make_ngram_vocab_size_divisible_by: int
    split_ngram_parts: int
    seed: int
    eos_token_id: int
    mtp_num_hidden_layers: int

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the sparse-attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == SPARSE)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the gated-delta-net layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def stream_width(self) -> int:
        """Width of the residual: hc_count streams of hidden_size, stream-major."""
        return self.hc_count * self.hidden_size

    @property
    def key_width(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the gated delta net's convolution: q, k and v side by side."""
        return 2 * self.key_width + self.value_width

    @property
    def attention_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def indexer_width(self) -> int:
        """Rows of index_qk_proj: the query heads, then one key head."""
        return (self.indexer_n_heads + 1) * self.indexer_head_dim

    @property
    def indexer_topk(self) -> int:
        """Blocks a query may select beside its open tail."""
        return self.indexer_budget // self.indexer_compress_ratio

    @property
    def ngram_heads(self) -> int:
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def ngram_head_dim(self) -> int:
        """Values of one table row."""
        return self.ple_embed_dim // self.ngram_heads

    @property
    def ngram_hash(self) -> NgramHash:
        """The hash constants this config implies; a checkpoint stores the same numbers."""
        return _ngram_hash(
            self.vocab_size,
            self.ngram_size,
            self.heads_per_ngram,
            self.ngram_vocab_size_base,
            self.seed,
            self.make_ngram_vocab_size_divisible_by,
        )

    @property
    def has_drafter(self) -> bool:
        return self.mtp_num_hidden_layers > 0

    @classmethod
    def load(cls, directory: Path, hf_overrides: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Read config.json of a checkpoint directory. Raises UserError if it is absent, broken or foreign."""
        path = directory / "config.json"
        if not path.is_file():
            raise UserError(f"a checkpoint needs config.json; {directory} has none; pass the model's directory")
        return cls.read(path, hf_overrides)

    @classmethod
    def read(cls, path: Path, hf_overrides: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Read one config.json. Raises UserError if it is absent, broken or foreign."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); pass the path of a config.json") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not valid JSON ({error}); download it again") from None
        return cls.from_dict(raw, source=str(path), hf_overrides=hf_overrides)

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], source: str = "config", hf_overrides: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Build from the parsed config.json, multimodal (with text_config) or text-only.

        hf_overrides replaces keys of the text config (vLLM's name for this), e.g. rope_parameters for YaRN.
        Raises UserError naming the key, what was wanted and what was found.
        """
        if not isinstance(raw, Mapping):
            raise UserError(f"{source}: wanted a JSON object; found {type(raw).__name__}; fetch it again")
        if raw.get("model_type") not in _MODEL_TYPES:
            raise UserError(
                f"{source}: model_type is {raw.get('model_type')!r}; stepfloor serves qwen4_exp "
                "(Qwen3.8-Flash-Next) alone"
            )
        text = dict(_section(raw, "text_config", source) or raw)
        text.update(hf_overrides or {})
        if text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False)):
            raise UserError(f"{source}: tie_word_embeddings is true; only untied heads are served")
        config = _read(text, source)
        _check(config, source)
        return config


GRAPH_SIZES = (1, 2, 4, 8, 16)  # sequences of the captured decode steps
MAX_DECODE_ROWS = 80  # that the decode kernels stream weights for; more would have the bits of another product
MAX_CHUNK = 65_535  # rows in one dimension of a CUDA grid


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the user asked of the engine; every field has vLLM's meaning where vLLM has the field.

    spec_tokens             drafts per step at most, 0..7
    spec_tokens_per_batch_size  (lowest, highest, drafts): fewer drafts while so many sequences decode together
    acceptance              standard: exact rejection rule; coupled: shared Gumbel noise, text independent of k
    max_num_seqs            sequences that decode together
    max_model_len           context in tokens, prompt and output together
    max_num_batched_tokens  longest prefill chunk in tokens; one chunk runs before each decode step
    block_size              tokens per page of the key/value cache
    kv_cache_dtype          auto is the model's dtype; fp8 is E4M3 without scales
    ngram_table             where the n-gram table lies: with the model, or in pinned host memory that kernels read
    enforce_eager           run decode steps kernel by kernel instead of as captured graphs
    long_prefill_token_threshold  longest chunk of a prompt that is longer than this; 0: no such limit
    max_num_queued_reqs     requests that may wait for a slot; None: any number
    num_gpu_blocks_override  pages of the cache; None: the longest sequence in every slot. With fewer, a request waits
                            until the pages of its prompt and max_tokens are free
    """

    spec_tokens: int = 3
    spec_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    acceptance: Literal["standard", "coupled"] = "standard"
    max_num_seqs: int = 1
    max_model_len: int = 4096
    max_num_batched_tokens: int = 512
    block_size: int = 64
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    ngram_table: Literal["device", "pinned"] = "device"
    enforce_eager: bool = False
    device: str = "cpu"
    long_prefill_token_threshold: int = 0
    max_num_queued_reqs: int | None = None
    num_gpu_blocks_override: int | None = None

    @property
    def positions(self) -> int:
        """Positions a sequence may touch: its context and three windows of drafts (Scheduler._reach says why)."""
        return self.max_model_len + 3 * self.spec_tokens + 1

    @property
    def pages_per_sequence(self) -> int:
        """Pages that hold the longest sequence with what a step writes beyond it."""
        return -(-self.positions // self.block_size)

    @property
    def num_pages(self) -> int:
        """Pages of the whole cache, the scratch page included."""
        return 1 + (self.num_gpu_blocks_override or self.max_num_seqs * self.pages_per_sequence)

    @property
    def chunk_tokens(self) -> int:
        """Longest prompt chunk."""
        return min(self.max_num_batched_tokens, self.long_prefill_token_threshold or self.max_num_batched_tokens)

    def drafts(self, sequences: int) -> int:
        """Drafts of a step in which so many sequences decode."""
        return next(
            (drafts for low, high, drafts in self.spec_tokens_per_batch_size if low <= sequences <= high),
            self.spec_tokens,
        )

    def graph_size(self, sequences: int) -> int:
        """Sequences of the decode graph that serves so many: the next of GRAPH_SIZES, or the engine's limit if less."""
        limit = self.max_num_seqs
        return next((size for size in GRAPH_SIZES if sequences <= size <= limit), max(sequences, limit))

    @property
    def decode_shapes(self) -> frozenset[tuple[int, int]]:
        """Sequences of a graph, and drafts, of every decode step there can be."""
        return frozenset((self.graph_size(count), self.drafts(count)) for count in range(1, self.max_num_seqs + 1))

    def check(self, model: ModelConfig) -> None:
        """Raise UserError for a request the engine cannot honour with this model."""
        if not 0 <= self.spec_tokens <= 7:
            raise UserError(f"--spec-tokens must be 0 to 7; got {self.spec_tokens}")
        if self.spec_tokens and not model.has_drafter:
            raise UserError("this checkpoint has no drafter (mtp.*); pass --spec-tokens 0")
        before = 0
        for low, high, drafts in self.spec_tokens_per_batch_size:
            if not before < low <= high or not 0 <= drafts <= self.spec_tokens:
                raise UserError(
                    "num_speculative_tokens_per_batch_size (--speculative-config) must be ascending ranges of "
                    f"sequences with 0 to {self.spec_tokens} drafts each (num_speculative_tokens), like "
                    f"[[1, 4, 3], [5, 16, 1]]; got [{low}, {high}, {drafts}]"
                )
            before = high
        if self.acceptance not in ("standard", "coupled"):
            raise UserError(f"--acceptance must be standard or coupled; got {self.acceptance!r}")
        if self.kv_cache_dtype not in ("auto", "fp8"):
            raise UserError(f"--kv-cache-dtype must be auto or fp8; got {self.kv_cache_dtype!r}")
        if self.ngram_table not in ("device", "pinned") or (self.ngram_table == "pinned" and self.device == "cpu"):
            raise UserError(
                "--ngram-table must be device, or pinned for a model on a GPU; "
                f"got {self.ngram_table!r} on {self.device}"
            )
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < 1:
            raise UserError(
                "--max-num-seqs and --max-num-batched-tokens must be at least 1; "
                f"got {self.max_num_seqs} and {self.max_num_batched_tokens}"
            )
        if self.max_num_batched_tokens > MAX_CHUNK:
            raise UserError(
                f"--max-num-batched-tokens must be at most {MAX_CHUNK}; got {self.max_num_batched_tokens}; a longer "
                "prompt is read in several chunks"
            )
        rows = max(size * (drafts + 1) for size, drafts in self.decode_shapes)
        if self.device != "cpu" and rows > MAX_DECODE_ROWS:
            raise UserError(
                f"a step on a GPU decodes at most {MAX_DECODE_ROWS} rows, a row for each sequence and each of its "
                f"drafts; --max-num-seqs {self.max_num_seqs} and --spec-tokens {self.spec_tokens} make {rows}; lower "
                "one of them, or let drafts follow the number of sequences (--speculative-config)"
            )
        if self.long_prefill_token_threshold < 0 or (self.max_num_queued_reqs or 0) < 0:
            raise UserError(
                "--long-prefill-token-threshold and --max-num-queued-reqs must not be negative; "
                f"got {self.long_prefill_token_threshold} and {self.max_num_queued_reqs}"
            )
        if self.block_size < 1 or self.block_size % model.indexer_compress_ratio:
            raise UserError(
                f"--block-size must be a multiple of the indexer's compress ratio "
                f"{model.indexer_compress_ratio}; got {self.block_size}"
            )
        one, every = self.pages_per_sequence, self.max_num_seqs * self.pages_per_sequence
        if self.num_gpu_blocks_override is not None and not one <= self.num_gpu_blocks_override <= every:
            raise UserError(
                f"--num-gpu-blocks-override must be {one} to {every}, the pages of {self.block_size} tokens that one "
                f"sequence of {self.max_model_len} (--max-model-len) and {self.max_num_seqs} of them (--max-num-seqs) "
                f"may need; got {self.num_gpu_blocks_override}"
            )
        if not 2 <= self.max_model_len <= model.max_position_embeddings:
            raise UserError(
                f"--max-model-len must be 2 to {model.max_position_embeddings} (the model's context); "
                f"got {self.max_model_len}"
            )


def _read(text: Mapping[str, Any], source: str) -> ModelConfig:
    def want(key: str, kind: type = int, default: Any = None) -> Any:
        value = text.get(key, default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(f"{source}: {key} must be {kind.__name__}; found {value!r}")
        return value

    eos = text.get("eos_token_id")
    # the reference hashes with the first id where a config lists several
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if not isinstance(eos, int):
        raise UserError(f"{source}: eos_token_id must be an integer (the n-gram segment id); found {eos!r}")
    if (hidden_act := text.get("hidden_act", "silu")) != "silu":
        raise UserError(f"{source}: hidden_act is {hidden_act!r}; only silu is served")
    mtp_layers = _section(text, "mtp", source).get("num_hidden_layers", 0)
    return ModelConfig(
        vocab_size=want("vocab_size"),
        hidden_size=want("hidden_size"),
        layer_types=_layer_types(text, source),
        rms_norm_eps=want("rms_norm_eps", float, 1e-6),
        hc_count=want("hc_count", default=4),
        hc_lowrank=want("hc_lowrank", default=320),
        linear_num_key_heads=want("linear_num_key_heads"),
        linear_num_value_heads=want("linear_num_value_heads"),
        linear_key_head_dim=want("linear_key_head_dim"),
        linear_value_head_dim=want("linear_value_head_dim"),
        linear_conv_kernel_dim=want("linear_conv_kernel_dim", default=4),
        output_gate_type=text.get("output_gate_type") or hidden_act,
        num_attention_heads=want("num_attention_heads"),
        num_key_value_heads=want("num_key_value_heads"),
        head_dim=want("head_dim"),
        rope=_rope(text, source),
        max_position_embeddings=want("max_position_embeddings"),
        indexer_n_heads=want("indexer_n_heads"),
        indexer_head_dim=want("indexer_head_dim"),
        indexer_budget=want("indexer_budget"),
        indexer_compress_ratio=want("indexer_compress_ratio"),
        num_experts=want("num_experts"),
        num_experts_per_tok=want("num_experts_per_tok"),
        norm_topk_prob=want("norm_topk_prob", bool, True),
        moe_intermediate_size=want("moe_intermediate_size"),
        shared_expert_intermediate_size=want("shared_expert_intermediate_size"),
        ple_layer=_ple_layer(text, source),
        ple_embed_dim=want("ple_embed_dim", default=text.get("hidden_size")),
        ple_conv_kernel_size=want("ple_conv_kernel_size", default=4),
        ngram_size=want("ngram_size", default=3),
        heads_per_ngram=want("heads_per_ngram", default=8),
        ngram_vocab_size_base=want("ngram_vocab_size_base", default=20_000_000),
        make_ngram_vocab_size_divisible_by=want("make_ngram_vocab_size_divisible_by", default=128),
        split_ngram_parts=want("split_ngram_parts", default=512),
        seed=want("seed", default=1234),
        eos_token_id=eos,
        mtp_num_hidden_layers=want("mtp_num_hidden_layers", default=mtp_layers),
    )


def _section(raw: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    """A nested object; absent and null read as empty."""
    section = raw.get(key)
    if section is not None and not isinstance(section, Mapping):
        raise UserError(f"{source}: {key} must be a JSON object; found {section!r}")
    return section or {}


def _layer_types(text: Mapping[str, Any], source: str) -> tuple[str, ...]:
    count, kinds = text.get("num_hidden_layers"), text.get("layer_types")
    if kinds is None:
        interval = text.get("full_attention_interval", 4)
        if not isinstance(count, int) or not isinstance(interval, int) or interval < 1:
            raise UserError(
                f"{source}: num_hidden_layers and full_attention_interval must be int; found {count!r}, {interval!r}"
            )
        kinds = [LINEAR if (i + 1) % interval else SPARSE for i in range(count)]
    if not isinstance(kinds, list):
        raise UserError(f"{source}: layer_types must be a list; found {kinds!r}")
    unknown = sorted({str(k) for k in kinds} - {LINEAR, *_SPARSE_ALIASES})
    if unknown or not kinds:
        raise UserError(f"{source}: layer_types may hold {LINEAR} and {SPARSE}; found {unknown or 'no layers'}")
    if count is not None and count != len(kinds):
        raise UserError(f"{source}: num_hidden_layers is {count} but layer_types lists {len(kinds)}")
    return tuple(SPARSE if kind in _SPARSE_ALIASES else LINEAR for kind in kinds)


def _rope(text: Mapping[str, Any], source: str) -> Rope:
    rope = _section(text, "rope_parameters", source) or _section(text, "rope_scaling", source)
    partial = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", text.get("rope_theta"))
    if kind not in ("default", "yarn") or not isinstance(theta, (int, float)):
        raise UserError(
            f"{source}: rope_parameters needs rope_type default or yarn and a rope_theta; found {kind!r} and {theta!r}"
        )
    if not isinstance(partial, (int, float)):
        raise UserError(f"{source}: partial_rotary_factor must be a number; found {partial!r}")
    dim = int(text["head_dim"] * partial)
    if kind == "default":
        return Rope(float(theta), dim)
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if not isinstance(factor, (int, float)) or not isinstance(original, int) or factor < 1:
        raise UserError(
            f"{source}: yarn needs factor >= 1 and original_max_position_embeddings; found {factor!r}, {original!r}"
        )
    return Rope(float(theta), dim, float(factor), original)


def _ple_layer(text: Mapping[str, Any], source: str) -> int:
    ids = text.get("ple_layer_ids") or []
    if not isinstance(ids, list) or len(ids) != 1 or type(ids[0]) is not int:
        raise UserError(f"{source}: ple_layer_ids must name one layer, counted from one; found {ids!r}")
    return ids[0] - 1


def _check(c: ModelConfig, source: str) -> None:
    def refuse(wanted: str, found: object) -> None:
        raise UserError(f"{source}: wanted {wanted}; found {found}; stepfloor does not serve this shape")

    sizes = {name: getattr(c, name) for name in ModelConfig.__slots__}
    if small := {k: v for k, v in sizes.items() if type(v) is int and v < 1 and k not in _MAY_BE_ZERO}:
        refuse("positive sizes", small)
    limits = {k: 1 << (16 if k in _COUNTS else 40) for k in sizes if k != "seed"}
    if huge := {k: sizes[k] for k, limit in limits.items() if type(sizes[k]) is int and sizes[k] >= limit}:
        refuse("sizes a checkpoint can have", huge)
    if c.output_gate_type not in ("sigmoid", "silu"):
        refuse("output_gate_type sigmoid or silu", c.output_gate_type)
    if c.hc_count < 2:
        refuse("hc_count of at least 2", c.hc_count)
    if c.linear_num_value_heads % c.linear_num_key_heads:
        refuse("value heads a multiple of key heads", (c.linear_num_value_heads, c.linear_num_key_heads))
    if c.num_attention_heads % c.num_key_value_heads:
        refuse("attention heads a multiple of kv heads", (c.num_attention_heads, c.num_key_value_heads))
    if c.rope.dim % 2 or not 2 <= c.rope.dim <= min(c.head_dim, c.indexer_head_dim):
        refuse(f"an even rotary size up to the head sizes {c.head_dim} and {c.indexer_head_dim}", c.rope.dim)
    if c.indexer_budget % c.indexer_compress_ratio:
        refuse("indexer_budget a multiple of indexer_compress_ratio", (c.indexer_budget, c.indexer_compress_ratio))
    if c.num_experts_per_tok > c.num_experts:
        refuse("num_experts_per_tok at most num_experts", (c.num_experts_per_tok, c.num_experts))
    if c.ngram_size < 2 or c.ple_embed_dim % c.ngram_heads:
        refuse("ple_embed_dim a multiple of the n-gram heads", (c.ple_embed_dim, c.ngram_heads))
    if not 0 <= c.ple_layer < c.num_hidden_layers or c.layer_types[c.ple_layer] != LINEAR:
        refuse("ple_layer_ids naming a linear_attention layer", c.ple_layer + 1)
    if c.mtp_num_hidden_layers not in (0, 1):
        refuse("mtp_num_hidden_layers 0 or 1", c.mtp_num_hidden_layers)
    if not 0 <= c.eos_token_id < c.vocab_size:
        refuse(f"eos_token_id inside the vocabulary of {c.vocab_size}", c.eos_token_id)


_COUNTS = ("num_experts", "split_ngram_parts", "ngram_size", "heads_per_ngram")
_MAY_BE_ZERO = ("ple_layer", "seed", "eos_token_id", "mtp_num_hidden_layers")

_U64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@lru_cache(maxsize=8)
def _ngram_hash(vocab: int, ngram: int, per_order: int, base: int, seed: int, divisor: int) -> NgramHash:
    # one n-gram layer is served, so its index among them (dense_index) is 0 throughout
    half = max(1, (((1 << 63) - 1) // vocab) // 2)
    multipliers = tuple(2 * (_splitmix64(seed + _GOLDEN * (i + 1)) % half) + 1 for i in range(ngram))
    sizes: list[int] = []
    candidate = base
    while len(sizes) < (ngram - 1) * per_order:
        if _is_prime(candidate):
            sizes.append(candidate)
        candidate += 1
    offsets = tuple(sum(sizes[:i]) for i in range(len(sizes)))
    rows = -(-sum(sizes) // divisor) * divisor
    return NgramHash(multipliers, tuple(sizes), offsets, rows)


def _splitmix64(value: int) -> int:
    value = (value + _GOLDEN) & _U64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _U64
    return value ^ (value >> 31)


def _is_prime(n: int) -> bool:
    return n == 2 or (n > 2 and n % 2 == 1 and all(n % d for d in range(3, math.isqrt(n) + 1, 2)))
