"""Operators' byte counts against the floor they add up to, and against sizes reckoned by hand."""

import pytest

from stepfloor.config import ModelConfig
from stepfloor.roofline import bytes as op
from stepfloor.roofline.floor import step_bytes
from stepfloor.roofline.planned import CASES
from tests.roofline.released import RELEASED


def test_hyper_connection_sizes() -> None:
    """Weights alone: down and inject are 324 rows of 10240, up 10240 of 320, router and shared expert 1793 of 2560."""
    down = op.hc_down(0, 2560, 4, 320, "bf16") - 10240 * 2  # less the norm
    assert f"{down / 2**20:.2f}" == "6.33"
    assert f"{op.hc_mix(0, 2560, 4, 320, 'bf16') / 2**20:.2f}" == "6.25"
    assert op.linear(0, 512 + 2 * 640 + 1, 2560, "bf16") == 1793 * 2560 * 2


def test_one_routed_row() -> None:
    """1793 products in; 640 hidden values, a gate and ten choices of 10 bytes out."""
    assert op.moe_route(1, 512, 10, 640) == 1793 * 2 + 641 * 2 + 100


def test_one_expert() -> None:
    """1,843,200 B gate and up, 921,600 B down in nvfp4, plus a 4-byte scale a matrix."""
    assert op.moe_gate_up(0, 1, 10, 2560, 640, "nvfp4") == 1_843_200 + 8
    assert op.moe_down(0, 1, 10, 2560, 640, "nvfp4", 640, "bf16") == 921_600 + 4 + 640 * 2560 * 2


def test_replayed_rows() -> None:
    """A row more is read and written once as projected (20,672 B) beside its own input and result."""
    one, two = (op.gdn_decode(1, rows, 16, 48, 128, 128, 4) for rows in (1, 2))
    activations = (10240 + 2 * 6144 + 96) * 2
    assert two - one == activations + 2 * 20_672


def test_table_rows_of_one_token() -> None:
    assert op.ngram_gather(1, 16, 160, "fp8_tensor") == 16 * 8 + 2560 + 2 + 5120
    assert op.ngram_gather(1, 16, 160, "nvfp4") == 16 * 8 + 16 * 90 + 4 + 5120


def test_drafter_input_of_one_token() -> None:
    """Residual and embedding row in, both normed, both projected, five vectors added to four."""
    assert op.mtp_norm(1, 2560, 4) - op.mtp_norm(0, 2560, 4) == 8 + 2 * (10240 + 2560) * 2
    assert op.mtp_fuse(1, 2560, 4) == (10240 + 2560 + 10240) * 2


@pytest.mark.parametrize("case", ["a", "b'", "c"])
@pytest.mark.parametrize("rows", [1, 4])
def test_operators_of_one_target_pass_add_up_to_the_floor(case: str, rows: int) -> None:
    """A weight that an operator forgets, or that two operators both count, breaks this.

    The operators move activations, windows and operands besides; at four rows those are below 1 %.
    """
    floor = step_bytes(RELEASED, CASES[case], spec_tokens=rows - 1).target.total
    operators = sum(target_pass(RELEASED, case, rows))
    assert floor <= operators <= 1.01 * floor


def target_pass(c: ModelConfig, case: str, rows: int) -> list[int]:
    """Bytes of every operator of one target pass over `rows` rows of one sequence, no context."""
    formats, d, s, rank = CASES[case], c.hidden_size, c.hc_count, c.hc_lowrank
    experts = op.distinct_experts(rows, c.num_experts, c.num_experts_per_tok)
    heads = (c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
    sizes = (c.num_experts_per_tok, d, c.moe_intermediate_size, formats.experts)
    shared = (c.shared_expert_intermediate_size, formats.dense)
    hyper_connection = [op.hc_down(rows, d, s, rank, formats.dense), op.hc_mix(rows, d, s, rank, formats.dense)]
    mlp = [
        *hyper_connection,
        op.linear(rows, c.num_experts + 1, d, "bf16"),
        op.linear(rows, 2 * c.shared_expert_intermediate_size, d, formats.dense),
        op.moe_route(rows, c.num_experts, c.num_experts_per_tok, c.shared_expert_intermediate_size),
        op.moe_gate_up(rows, experts, *sizes),
        op.moe_down(rows, experts, *sizes, *shared),
    ]
    linear_attention = [
        *hyper_connection,
        op.linear(rows, c.conv_width + c.value_width, d, formats.dense),
        op.linear(rows, 2 * c.linear_num_value_heads, d, "bf16"),
        op.gdn_decode(1, rows, *heads, c.linear_conv_kernel_dim),
        op.linear(rows, d, c.value_width, formats.dense),
    ]
    attention = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    indexer = (c.indexer_n_heads, c.indexer_head_dim, c.indexer_compress_ratio)
    sparse_attention = [
        *hyper_connection,
        op.linear(rows, 2 * c.attention_width + 2 * c.kv_width, d, formats.dense),
        op.linear(rows, c.indexer_width, d, "bf16"),
        op.qsa_prepare(rows, *attention, *indexer),
        op.qsa_select(1, rows, 0, *indexer, c.indexer_topk),
        op.qsa_attend(1, rows, 0, *attention, c.indexer_compress_ratio, c.indexer_topk),
        op.linear(rows, d, c.attention_width, formats.dense),
    ]
    ngram = [
        op.ngram_rows(rows, c.ngram_size, c.ngram_heads),
        op.ngram_gather(rows, c.ngram_heads, c.ngram_head_dim, formats.table),
        op.linear(rows, c.stream_width + d, c.ple_embed_dim, "bf16"),
        op.ple_mix(1, rows, d, s, c.ple_conv_kernel_size, c.ngram_size),
    ]
    ends = [
        op.embed(rows, d, s),
        op.hc_down(rows, d, s, rank, formats.dense, inject=False),
        op.hc_mix(rows, d, s, rank, formats.dense),
        op.linear(rows, c.vocab_size, d, formats.head),
    ]
    layers = len(c.linear_layers) * linear_attention + len(c.sparse_layers) * sparse_attention
    return [*ends, *ngram, *layers, *(c.num_hidden_layers * mlp)]
