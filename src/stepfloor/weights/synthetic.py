"""A checkpoint that lies in no file: every tensor of a layout by name, dtype and shape, for weights drawn in memory.

Source: weights.expected for names and shapes, formats.table for how a format stores a matrix.
"""

from collections.abc import Callable
from math import prod
from pathlib import Path

from stepfloor.config import ModelConfig
from stepfloor.formats.table import DTYPE_BYTES, FORMATS, stored_bytes
from stepfloor.weights.checkpoint import Checkpoint, Table, Weight
from stepfloor.weights.expected import (
    Expected,
    Shape,
    draft_head,
    expected_weights,
    expert_blocks,
    fused_experts,
    shard_heights,
    single_experts,
    table_name,
)
from stepfloor.weights.headers import Entry

NOWHERE = Path("<memory>")


def synthetic_checkpoint(config: ModelConfig, format_of: Callable[[str], str]) -> Checkpoint:
    """The checkpoint of a configuration with every matrix in the format that format_of gives its canonical name.

    Quantized experts are single matrices and plain ones fused, as releases have them. format_of of `mtp.lm_head` may
    be "", which leaves the drafter without a head of its own. Its entries cannot be read.
    """
    weights: dict[str, Weight] = {}

    def add(expected: Expected, format_name: str) -> None:
        weights[expected.name] = Weight(expected.name, expected.shape, format_name, _parts(expected, format_name))

    for expected in expected_weights(config, config.has_drafter).values():
        kinds = {"buffer": "int64", "plain": "bf16"}
        add(expected, kinds.get(expected.kind) or format_of(expected.name))
    for block in expert_blocks(config, config.has_drafter):
        format_name = format_of(f"{block}.gate_up_proj")
        for expected in (fused_experts if format_name == "bf16" else single_experts)(config, block):
            add(expected, format_name)
    if config.has_drafter and (own_head := format_of("mtp.lm_head")):
        add(draft_head(config), own_head)
    table = _add_table(config, format_of(table_name(config)), weights)
    return Checkpoint(NOWHERE, config, weights, table, (), (), config.has_drafter, {}, (config.eos_token_id,), 0, 0)


def _parts(expected: Expected, format_name: str) -> dict[str, Entry]:
    if format_name in ("bf16", "fp32", "int64"):
        return {"weight": _entry("I64" if format_name == "int64" else FORMATS[format_name].dtype, expected.shape)}
    n, k = expected.shape[-2:]
    form = FORMATS[format_name]
    parts = {"weight": _entry(form.dtype, form.weight_shape(n, k))}
    for companion in form.companions:
        if not companion.optional:
            parts[companion.suffix] = _entry(companion.dtypes[0], companion.shape(n, k))
    return parts


def _add_table(config: ModelConfig, format_name: str, weights: dict[str, Weight]) -> Table:
    name, width, heights = table_name(config), config.ngram_head_dim, shard_heights(config)
    shared = {"fp8_tensor": ("weight_scale", "BF16", (1,)), "nvfp4": ("weight_scale_2", "F32", ())}.get(format_name)
    for i, height in enumerate(heights):
        parts = _parts(Expected(f"{name}.shard_{i}", (height, width), "linear"), format_name)
        if shared is not None:
            parts.pop(shared[0])
        weights[f"{name}.shard_{i}"] = Weight(f"{name}.shard_{i}", (height, width), format_name, parts)
    scale = None
    if shared is not None:
        suffix, dtype, shape = shared
        scale = weights[name] = Weight(name, (1,), format_name, {suffix: _entry(dtype, shape)})
    row_bytes = stored_bytes(format_name, 1, width) - (0 if shared is None else DTYPE_BYTES[shared[1]])
    return Table(name, sum(heights), width, heights[0], heights, format_name, scale, row_bytes)


def _entry(dtype: str, shape: Shape) -> Entry:
    return Entry(NOWHERE, dtype, shape, 0, prod(shape) * DTYPE_BYTES[dtype])
