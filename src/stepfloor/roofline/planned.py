"""Every text weight of a shape, and its bytes under a planned mix of formats.

Source: tensor list of the bf16 release; its total follows from this list to the byte.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stepfloor.config import ModelConfig
from stepfloor.formats.table import stored_bytes
from stepfloor.roofline.groups import pass_group


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The storage format of each group of matrices; router, indexer, small projections and vectors stay bf16.

    dense      gated delta net and attention projections, hyper-connections, shared experts
    draft_head the head as the drafter reads it; equal to `head` where there is one copy for both
    mtp_dense  the drafter's projections, hyper-connections, shared expert and the two input matrices
    table      rows of the n-gram table
    """

    experts: str = "bf16"
    dense: str = "bf16"
    head: str = "bf16"
    mtp_experts: str = "bf16"
    mtp_dense: str = "bf16"
    draft_head: str = "bf16"
    table: str = "fp8_tensor"


# The letters are those of the published tables; FP8 there carries no scales worth counting, as fp8_tensor does.
CASES: dict[str, WeightFormats] = {
    "a": WeightFormats("nvfp4"),
    "b": WeightFormats("nvfp4", "fp8_tensor", "bf16", "bf16", "fp8_tensor", "bf16"),
    "b'": WeightFormats("nvfp4", "fp8_tensor", "fp8_tensor", "bf16", "fp8_tensor", "fp8_tensor"),
    "c": WeightFormats("nvfp4", "fp8_tensor", "mxfp8", "fp8_tensor", "fp8_tensor", "nvfp4"),
    "c'": WeightFormats("nvfp4", "fp8_tensor", "nvfp4", "fp8_tensor", "fp8_tensor", "nvfp4"),
}


@dataclass(frozen=True, slots=True)
class Stored:
    """Format and stored bytes of one canonical weight, companions included."""

    format: str
    num_bytes: int


def planned_weights(config: ModelConfig, formats: WeightFormats) -> dict[str, Stored]:
    """Canonical name -> format and bytes of every text weight of this shape under a mix of formats."""
    planned: dict[str, Stored] = {}
    for name, count, n, k in _matrices(config):
        drafter, group = name.startswith("mtp."), pass_group(name)
        format_name = {
            "experts": formats.mtp_experts if drafter else formats.experts,
            "dense": formats.mtp_dense if drafter else formats.dense,
            "head": formats.draft_head if drafter else formats.head,
            "table": formats.table,
        }.get(group, "bf16")
        planned[name] = Stored(format_name, count * stored_bytes(format_name, n, k))
    if config.has_drafter and formats.draft_head == formats.head:
        del planned["mtp.lm_head"]  # one copy serves both
    return planned


def _matrices(c: ModelConfig) -> Iterator[tuple[str, int, int, int]]:
    """(canonical name, how many, rows, columns) of every text weight; a vector is a matrix of one row."""
    yield "embed_tokens", 1, c.vocab_size, c.hidden_size
    yield "lm_head", 1, c.vocab_size, c.hidden_size
    yield from _hyper_connection("hyper_connection_mixer", c, inject=False)
    for layer in range(c.num_hidden_layers):
        mixer = _linear_attention if layer in c.linear_layers else _sparse_attention
        yield from mixer(f"layers.{layer}", c)
        yield from _feed_forward(f"layers.{layer}", c)
    yield from _ngram(f"layers.{c.ple_layer}.ple", c)
    if c.has_drafter:
        yield "mtp.lm_head", 1, c.vocab_size, c.hidden_size
        yield "mtp.fc_embedding", 1, c.hidden_size, c.hidden_size
        yield "mtp.fc_hidden", 1, c.hidden_size, c.hidden_size
        yield "mtp.pre_fc_norm_embedding", 1, 1, c.hidden_size
        yield "mtp.pre_fc_norm_hidden", 1, 1, c.stream_width
        yield from _hyper_connection("mtp.hyper_connection_mixer", c, inject=False)
        yield from _sparse_attention("mtp.layers.0", c)
        yield from _feed_forward("mtp.layers.0", c)


def _hyper_connection(at: str, c: ModelConfig, inject: bool) -> Iterator[tuple[str, int, int, int]]:
    yield f"{at}.hc_norm", 1, 1, c.stream_width
    yield f"{at}.input_mix_weight_down", 1, c.hc_lowrank, c.stream_width
    yield f"{at}.input_mix_weight_up", 1, c.stream_width, c.hc_lowrank
    if inject:
        yield f"{at}.block_inject_weight", 1, c.hc_count, c.stream_width


def _linear_attention(at: str, c: ModelConfig) -> Iterator[tuple[str, int, int, int]]:
    heads = c.linear_num_value_heads
    yield f"{at}.linear_attn.in_proj_qkv", 1, c.conv_width, c.hidden_size
    yield f"{at}.linear_attn.in_proj_z", 1, c.value_width, c.hidden_size
    yield f"{at}.linear_attn.in_proj_b", 1, heads, c.hidden_size
    yield f"{at}.linear_attn.in_proj_a", 1, heads, c.hidden_size
    yield f"{at}.linear_attn.out_proj", 1, c.hidden_size, c.value_width
    yield f"{at}.linear_attn.conv1d", 1, c.conv_width, c.linear_conv_kernel_dim
    yield f"{at}.linear_attn.A_log", 1, 1, heads
    yield f"{at}.linear_attn.dt_bias", 1, 1, heads
    yield f"{at}.linear_attn.norm", 1, 1, c.linear_value_head_dim


def _sparse_attention(at: str, c: ModelConfig) -> Iterator[tuple[str, int, int, int]]:
    yield f"{at}.self_attn.q_proj", 1, 2 * c.attention_width, c.hidden_size  # query and output gate
    yield f"{at}.self_attn.k_proj", 1, c.kv_width, c.hidden_size
    yield f"{at}.self_attn.v_proj", 1, c.kv_width, c.hidden_size
    yield f"{at}.self_attn.o_proj", 1, c.hidden_size, c.attention_width
    yield f"{at}.self_attn.q_norm", 1, 1, c.head_dim
    yield f"{at}.self_attn.k_norm", 1, 1, c.head_dim
    yield f"{at}.self_attn.indexer.index_qk_proj", 1, c.indexer_width, c.hidden_size
    yield f"{at}.self_attn.indexer.q_layernorm", 1, 1, c.indexer_head_dim
    yield f"{at}.self_attn.indexer.k_layernorm", 1, 1, c.indexer_head_dim


def _feed_forward(at: str, c: ModelConfig) -> Iterator[tuple[str, int, int, int]]:
    """The layer's experts, and both of its hyper-connections."""
    yield from _hyper_connection(f"{at}.attn_hyper_connection", c, inject=True)
    yield from _hyper_connection(f"{at}.mlp_hyper_connection", c, inject=True)
    yield f"{at}.mlp.gate", 1, c.num_experts, c.hidden_size
    yield f"{at}.mlp.shared_expert_gate", 1, 1, c.hidden_size
    # gate and up are stored apart where experts are quantized, so each carries its own scales
    yield f"{at}.mlp.experts.gate_up_proj", 2 * c.num_experts, c.moe_intermediate_size, c.hidden_size
    yield f"{at}.mlp.experts.down_proj", c.num_experts, c.hidden_size, c.moe_intermediate_size
    yield f"{at}.mlp.shared_expert.gate_proj", 1, c.shared_expert_intermediate_size, c.hidden_size
    yield f"{at}.mlp.shared_expert.up_proj", 1, c.shared_expert_intermediate_size, c.hidden_size
    yield f"{at}.mlp.shared_expert.down_proj", 1, c.hidden_size, c.shared_expert_intermediate_size


def _ngram(at: str, c: ModelConfig) -> Iterator[tuple[str, int, int, int]]:
    yield f"{at}.key_proj", 1, c.stream_width, c.ple_embed_dim
    yield f"{at}.value_proj", 1, c.hidden_size, c.ple_embed_dim
    for norm in ("norm_key", "norm_query", "norm_conv"):
        yield f"{at}.{norm}", 1, 1, c.stream_width
    yield f"{at}.conv1d", 1, c.stream_width, c.ple_conv_kernel_size
    yield f"{at}.ple_embedding.ngram_embedding", 1, c.ngram_hash.rows, c.ngram_head_dim
