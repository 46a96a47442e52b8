"""Every tensor a `qwen4_exp` checkpoint must hold, by canonical name, with its logical shape.

A canonical name is the bf16 release's without the text prefix and `.weight`: `layers.3.self_attn.q_proj`.
Source: tensor list of the bf16 release (its byte total follows from this list to the byte) and of vLLM's loader.
"""

import re
import sys
from dataclasses import dataclass
from typing import Literal

from stepfloor.config import SPARSE, ModelConfig

Kind = Literal["plain", "linear", "fused", "buffer"]
Shape = tuple[int, ...]

PARTS = ("weight", "weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale")
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
VISION_PREFIXES = ("model.visual.", "visual.")


@dataclass(frozen=True, slots=True)
class Expected:
    """One logical tensor.

    shape  logical: [N, K] for a matrix, whatever the format stores
    kind   plain: stored as it is (bf16 or fp32); linear: may be quantized; fused: [experts, N, K], never
           quantized; buffer: int64
    """

    name: str
    shape: Shape
    kind: Kind


def split_name(stored: str) -> tuple[str, str]:
    """(canonical name, part) of a stored name; part is one of PARTS, or an unknown suffix that ends in `scale`.

    >>> split_name("model.language_model.layers.3.self_attn.q_proj.weight_scale")
    ('layers.3.self_attn.q_proj', 'weight_scale')
    >>> split_name("model.mtp.fc_hidden.weight")
    ('mtp.fc_hidden', 'weight')
    >>> split_name("model.layers.0.linear_attn.A_log")
    ('layers.0.linear_attn.A_log', 'weight')
    """
    for prefix in _TEXT_PREFIXES:
        if stored.startswith(prefix):
            stored = stored[len(prefix) :]
            break
    module, _, suffix = stored.rpartition(".")
    if suffix in PARTS or suffix.endswith("scale"):
        return module, sys.intern(suffix)  # a few words for 10**5 names
    return stored, "weight"


def is_ignored(canonical: str) -> bool:
    """Tensors some exports carry that the model does not read."""
    return (
        "hashstats_" in canonical
        or canonical.endswith("token_lookup")
        or canonical.endswith("hyper_connection_mixer.block_inject_weight")
    )


def expected_weights(config: ModelConfig, drafter: bool) -> dict[str, Expected]:
    """Every tensor but routed experts and the n-gram table, which come in more than one layout."""
    h, v = config.hidden_size, config.vocab_size
    found = [
        Expected("embed_tokens", (v, h), "plain"),
        Expected("lm_head", (v, h), "linear"),
        *_mixer(config, "hyper_connection_mixer"),
    ]
    for i, kind in enumerate(config.layer_types):
        found += _layer(config, f"layers.{i}", kind == SPARSE)
    found += _ple(config, f"layers.{config.ple_layer}.ple")
    if drafter:
        found += [
            Expected("mtp.fc_embedding", (h, h), "linear"),
            Expected("mtp.fc_hidden", (h, h), "linear"),
            Expected("mtp.pre_fc_norm_embedding", (h,), "plain"),
            Expected("mtp.pre_fc_norm_hidden", (config.stream_width,), "plain"),
            *_mixer(config, "mtp.hyper_connection_mixer"),
            *_layer(config, "mtp.layers.0", sparse=True),
        ]
    return {e.name: e for e in found}


def draft_head(config: ModelConfig) -> Expected:
    """The drafter's own head, which an export may add; without it the drafter uses `lm_head`."""
    return Expected("mtp.lm_head", (config.vocab_size, config.hidden_size), "linear")


def expert_blocks(config: ModelConfig, drafter: bool) -> tuple[str, ...]:
    """Prefixes under which a layer's routed experts are stored."""
    layers = tuple(f"layers.{i}.mlp.experts" for i in range(config.num_hidden_layers))
    return (*layers, "mtp.layers.0.mlp.experts") if drafter else layers


def fused_experts(config: ModelConfig, block: str) -> tuple[Expected, ...]:
    """The two three-dimensional tensors of a layer; gate rows come before up rows."""
    e, h, i = config.num_experts, config.hidden_size, config.moe_intermediate_size
    return (
        Expected(f"{block}.gate_up_proj", (e, 2 * i, h), "fused"),
        Expected(f"{block}.down_proj", (e, h, i), "fused"),
    )


def single_experts(config: ModelConfig, block: str) -> tuple[Expected, ...]:
    """The same experts as three matrices each."""
    h, i = config.hidden_size, config.moe_intermediate_size
    shapes = (("gate_proj", (i, h)), ("up_proj", (i, h)), ("down_proj", (h, i)))
    return tuple(
        Expected(f"{block}.{e}.{name}", shape, "linear") for e in range(config.num_experts) for name, shape in shapes
    )


def table_name(config: ModelConfig) -> str:
    """Canonical name of the n-gram table; its shards are `<name>.shard_<i>`."""
    return f"layers.{config.ple_layer}.ple.ple_embedding.ngram_embedding"


def shard_heights(config: ModelConfig) -> tuple[int, ...]:
    """Rows of each shard: equal ones, the last shorter; shards past the last row are not stored."""
    rows = config.ngram_hash.rows
    height = -(-rows // config.split_ngram_parts)
    return tuple(min(height, rows - start) for start in range(0, rows, height))


def hash_buffers(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The int64 buffers by canonical name, with the values the config implies."""
    base, constants = f"layers.{config.ple_layer}.ple.ple_embedding", config.ngram_hash
    return {
        f"{base}.layer_multipliers": constants.multipliers,
        f"{base}.ngram_heads_vocab_sizes": constants.sizes,
        f"{base}.ngram_heads_offsets": constants.offsets,
    }


CATEGORIES = (
    "routed experts",
    "gated delta net",
    "sparse attention",
    "hyper-connections",
    "shared experts",
    "indexer",
    "router",
    "embedding",
    "lm_head",
    "n-gram table",
    "PLE projections",
    "drafter experts",
    "drafter, rest",
    "norms and other",
)
_CATEGORY_RULES = (
    (r"mtp\..*mlp\.experts(\.|$)", "drafter experts"),
    (r"mtp\.", "drafter, rest"),
    (r".*mlp\.experts(\.|$)", "routed experts"),
    (r".*shared_expert\.", "shared experts"),
    (r".*mlp\.gate$", "router"),
    (r".*hyper_connection", "hyper-connections"),
    (r".*indexer\.", "indexer"),
    (r".*self_attn\.[qkvo]_proj$", "sparse attention"),
    (r".*linear_attn\.(in_proj|out_proj)", "gated delta net"),
    (r".*ngram_embedding", "n-gram table"),
    (r".*ple\.(key|value)_proj$", "PLE projections"),
    (r"embed_tokens$", "embedding"),
    (r"lm_head$", "lm_head"),
)


def category(name: str) -> str:
    """Which of CATEGORIES a canonical name belongs to.

    >>> category("layers.0.mlp.experts.3.up_proj"), category("mtp.fc_hidden"), category("layers.0.linear_attn.A_log")
    ('routed experts', 'drafter, rest', 'norms and other')
    """
    for pattern, label in _CATEGORY_RULES:
        if re.match(pattern, name):
            return label
    return "norms and other"


def _layer(config: ModelConfig, base: str, sparse: bool) -> list[Expected]:
    h, shared = config.hidden_size, config.shared_expert_intermediate_size
    return [
        *(
            _sparse_attention(config, f"{base}.self_attn")
            if sparse
            else _linear_attention(config, f"{base}.linear_attn")
        ),
        *_hyper_connection(config, f"{base}.attn_hyper_connection"),
        *_hyper_connection(config, f"{base}.mlp_hyper_connection"),
        Expected(f"{base}.mlp.gate", (config.num_experts, h), "plain"),
        Expected(f"{base}.mlp.shared_expert.gate_proj", (shared, h), "linear"),
        Expected(f"{base}.mlp.shared_expert.up_proj", (shared, h), "linear"),
        Expected(f"{base}.mlp.shared_expert.down_proj", (h, shared), "linear"),
        Expected(f"{base}.mlp.shared_expert_gate", (1, h), "plain"),
    ]


def _mixer(config: ModelConfig, base: str) -> list[Expected]:
    width, rank = config.stream_width, config.hc_lowrank
    return [
        Expected(f"{base}.hc_norm", (width,), "plain"),
        Expected(f"{base}.input_mix_weight_down", (rank, width), "linear"),
        Expected(f"{base}.input_mix_weight_up", (width, rank), "linear"),
    ]


def _hyper_connection(config: ModelConfig, base: str) -> list[Expected]:
    inject = Expected(f"{base}.block_inject_weight", (config.hc_count, config.stream_width), "linear")
    return [*_mixer(config, base), inject]


def _linear_attention(config: ModelConfig, base: str) -> list[Expected]:
    h, heads = config.hidden_size, config.linear_num_value_heads
    return [
        Expected(f"{base}.in_proj_qkv", (config.conv_width, h), "linear"),
        Expected(f"{base}.in_proj_z", (config.value_width, h), "linear"),
        Expected(f"{base}.in_proj_b", (heads, h), "linear"),
        Expected(f"{base}.in_proj_a", (heads, h), "linear"),
        Expected(f"{base}.conv1d", (config.conv_width, 1, config.linear_conv_kernel_dim), "plain"),
        Expected(f"{base}.A_log", (heads,), "plain"),
        Expected(f"{base}.dt_bias", (heads,), "plain"),
        Expected(f"{base}.norm", (config.linear_value_head_dim,), "plain"),
        Expected(f"{base}.out_proj", (h, config.value_width), "linear"),
    ]


def _sparse_attention(config: ModelConfig, base: str) -> list[Expected]:
    h, d = config.hidden_size, config.head_dim
    return [
        Expected(f"{base}.q_proj", (2 * config.attention_width, h), "linear"),  # a query and its gate per head
        Expected(f"{base}.k_proj", (config.kv_width, h), "linear"),
        Expected(f"{base}.v_proj", (config.kv_width, h), "linear"),
        Expected(f"{base}.o_proj", (h, config.attention_width), "linear"),
        Expected(f"{base}.q_norm", (d,), "plain"),
        Expected(f"{base}.k_norm", (d,), "plain"),
        Expected(f"{base}.indexer.index_qk_proj", (config.indexer_width, h), "linear"),
        Expected(f"{base}.indexer.q_layernorm", (config.indexer_head_dim,), "plain"),
        Expected(f"{base}.indexer.k_layernorm", (config.indexer_head_dim,), "plain"),
    ]


def _ple(config: ModelConfig, base: str) -> list[Expected]:
    width, embed = config.stream_width, config.ple_embed_dim
    return [
        Expected(f"{base}.key_proj", (width, embed), "linear"),
        Expected(f"{base}.value_proj", (config.hidden_size, embed), "linear"),
        *(Expected(f"{base}.{norm}", (width,), "plain") for norm in ("norm_key", "norm_query", "norm_conv")),
        Expected(f"{base}.conv1d", (width, 1, config.ple_conv_kernel_size), "plain"),
        *(Expected(name, (len(values),), "buffer") for name, values in hash_buffers(config).items()),
    ]
