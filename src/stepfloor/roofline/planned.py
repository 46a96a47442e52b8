"""The bytes of every text weight under a planned mix of formats. Source: weights/expected.py."""

import math
from dataclasses import dataclass

from stepfloor.config import ModelConfig
from stepfloor.formats.table import DTYPE_BYTES, stored_bytes
from stepfloor.roofline.groups import pass_group
from stepfloor.weights.expected import draft_head, expected_weights, expert_blocks, fused_experts, table_name


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

    def plan(name: str, count: int, n: int, k: int) -> None:
        format_name = _planned_format(name, formats)
        planned[name] = Stored(format_name, count * stored_bytes(format_name, n, k))

    for expected in expected_weights(config, config.has_drafter).values():
        if expected.kind == "buffer":
            planned[expected.name] = Stored("int64", DTYPE_BYTES["I64"] * math.prod(expected.shape))
        else:
            # a vector is a matrix of one row
            *rows, k = expected.shape
            plan(expected.name, 1, math.prod(rows), k)
    for block in expert_blocks(config, config.has_drafter):
        gate_up, down = fused_experts(config, block)
        experts, n, k = gate_up.shape
        # quantized releases store gate and up apart, each with scales of its own
        plan(gate_up.name, 2 * experts, n // 2, k)
        plan(down.name, *down.shape)
    plan(table_name(config), 1, config.ngram_hash.rows, config.ngram_head_dim)
    if config.has_drafter and formats.draft_head != formats.head:
        plan(draft_head(config).name, 1, *draft_head(config).shape)
    return planned


def _planned_format(name: str, formats: WeightFormats) -> str:
    drafter = name.startswith("mtp.")
    return {
        "experts": formats.mtp_experts if drafter else formats.experts,
        "dense": formats.mtp_dense if drafter else formats.dense,
        "head": formats.draft_head if drafter else formats.head,
        "table": formats.table,
    }.get(pass_group(name), "bf16")
