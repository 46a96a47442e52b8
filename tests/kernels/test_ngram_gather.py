"""Table rows, from shards of every format."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels.ngram_gather import (
    GatherTable,
    launch_gather,
    ngram_gather,
    ngram_gather_inputs,
    ngram_gather_reference,
    ngram_gather_table,
)
from tests.kernels.compare import assert_rows_alone, assert_same, assert_within, decoded, twin, with_weights
from tests.kernels.edges import DEVICE, REAL, empty_is_nan, fenced
from tests.kernels.source import Recording, as_stored

DTYPES = [torch.float32, torch.bfloat16]
TABLE_FORMATS = ["bf16", "fp32", "fp8_tensor", "nvfp4"]


@pytest.mark.parametrize("parts", [1, 3])
def test_gathered_rows_are_the_sources(recording: Recording, parts: int) -> None:
    prefix = "layers.1.ple.ple_embedding"
    table = recording.module(f"{prefix}.ngram_embedding").weight.detach()
    height = -(-table.shape[0] // parts)
    shards = [as_stored(shard) for shard in table.split(height)]
    ours = ngram_gather(recording.into(f"{prefix}.ngram_embedding"), shards, recording.dtype)
    assert_same(ours, recording.out(prefix))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TABLE_FORMATS)
def test_every_format_is_its_decoded_table(name: str, dtype: torch.dtype) -> None:
    inputs = ngram_gather_inputs(13, 5, 48, 7, 3, name, dtype, "cpu")
    ours = ngram_gather(**inputs)
    table = torch.cat([shard.dequantize() for shard in inputs["shards"]])
    assert_same(ours, table[inputs["rows"]].flatten(1).to(dtype))
    assert_same(ours, ngram_gather(**with_weights(inputs, decoded)))
    # the twin is rounded to bf16 once: in bf16 the same numbers, in float32 off by 2**-8
    near = ngram_gather(**with_weights(inputs, twin))
    if dtype == torch.bfloat16:
        assert_same(near, ours)
    else:
        assert_within(near, ours, 2.0**-8 * ours.double().abs())


def test_code_times_scale_is_rounded_once() -> None:
    """A float32 scale rounded to bf16 before the product, 1 + 2**-8 + 2**-12 to 1 + 2**-7, moves the row by a step."""
    code = torch.tensor([[1.75, 1.25]]).to(torch.float8_e4m3fn)
    scale = torch.tensor([1 + 2**-8 + 2**-12])
    table = PackedWeight("fp8_tensor", (1, 2), code, scale)
    rows = torch.zeros(1, 1, dtype=torch.int64)
    assert ngram_gather(rows, (table,), torch.float32).tolist() == [[1.75 * scale.item(), 1.25 * scale.item()]]
    # 1.7573 lies between 1.75 and 1.7578125, 1.2551 between 1.25 and 1.2578125
    assert ngram_gather(rows, (table,), torch.bfloat16).tolist() == [[1.7578125, 1.2578125]]


def test_a_row_lies_where_its_shard_begins() -> None:
    """First and last row of each shard; the last shard is shorter than the others."""
    table = torch.arange(8.0)[:, None].repeat(1, 2)
    shards = [quantize(part, "fp32") for part in table.split(3)]
    assert [shard.shape[0] for shard in shards] == [3, 3, 2]
    rows = torch.tensor([[0, 2, 3], [5, 6, 7]])
    assert ngram_gather(rows, shards, torch.float32)[:, ::2].tolist() == rows.tolist()


def test_block_scales_go_with_their_rows() -> None:
    """Each NVFP4 row has its own block scales; those of row 0 would make every row as large as the first."""
    table = 2.0 ** torch.arange(4.0)[:, None] * torch.ones(4, 32)
    gathered = ngram_gather(torch.tensor([[3], [0]]), (quantize(table, "nvfp4"),), torch.float32)
    # an E4M3 block scale holds a power of two exactly once the table's scale is divided out; else 2**-4
    assert_within(gathered, table[[3, 0]], 2.0**-4 * table[[3, 0]])


@pytest.mark.parametrize("name", TABLE_FORMATS)
def test_rows_do_not_disturb_each_other(name: str) -> None:
    assert_rows_alone(ngram_gather, ngram_gather_inputs(21, 5, 16, 11, 3, name, torch.bfloat16, "cpu"), ("rows",))


def test_heads_lie_side_by_side_in_order() -> None:
    table = quantize(torch.arange(12.0).reshape(4, 3), "fp32")
    assert ngram_gather(torch.tensor([[[2, 0]]]), (table,), torch.float32).tolist() == [[[6, 7, 8, 0, 1, 2]]]


def test_table_without_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one shard; got none"):
        ngram_gather(torch.zeros(1, 1).long(), (), torch.float32)


def fenced_table(inputs: dict[str, Any], pinned: bool = False) -> GatherTable:
    """Every shard in poisoned memory of its own, every other one on the host where pinned."""

    def moved(value: Any, away: bool) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        return value.cpu().pin_memory() if away else fenced(value)

    shards = [
        replace(s, data=moved(s.data, pinned and i % 2 == 1), scale=moved(s.scale, pinned and i % 2 == 1))
        for i, s in enumerate(inputs["shards"])
    ]
    return ngram_gather_table(shards, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TABLE_FORMATS)
@pytest.mark.parametrize(
    ("t", "heads", "width", "height", "parts"),
    [
        (13, 5, 48, 7, 3),
        (3, 8, 32, 50, 1),
        *(pytest.param(t, 16, 160, 250_001, 3, marks=REAL) for t in (1, 4, 80, 8192)),
    ],
)
def test_kernel_is_the_reference(
    t: int, heads: int, width: int, height: int, parts: int, name: str, dtype: torch.dtype
) -> None:
    inputs = ngram_gather_inputs(t, heads, width, height, parts, name, dtype, DEVICE)
    table = fenced_table(inputs)
    rows = fenced(inputs["rows"])
    with empty_is_nan():
        ours = launch_gather(rows, table, dtype)
    assert_same(ours, ngram_gather_reference(**inputs))
    assert_same(ngram_gather(rows, table, dtype), ours)


def test_kernel_reads_odd_rows_and_a_shorter_last_shard() -> None:
    """Rows of 6 bytes lie at no multiple of 4; the last shard has two of three rows."""
    table = torch.arange(24.0, device=DEVICE).reshape(8, 3)
    shards = [quantize(part.contiguous(), "bf16") for part in table.split(3)]
    made = ngram_gather_table(shards, DEVICE)
    assert made.alignment == 2
    rows = torch.tensor([[0, 2, 3], [5, 6, 7]], device=DEVICE)
    assert_same(launch_gather(rows, made, torch.float32), table[rows].flatten(1))


@pytest.mark.parametrize("name", ["fp8_tensor", "nvfp4"])
def test_shards_may_have_scales_of_their_own(name: str) -> None:
    shards = [quantize((1 + i) * torch.randn(5, 16, device=DEVICE), name) for i in range(3)]
    rows = torch.arange(15, device=DEVICE)[:, None]
    ours = launch_gather(rows, ngram_gather_table(shards, DEVICE), torch.bfloat16)
    assert_same(ours, torch.cat([s.dequantize() for s in shards]).to(torch.bfloat16))


def test_kernel_rows_do_not_disturb_each_other() -> None:
    inputs = ngram_gather_inputs(21, 5, 16, 11, 3, "nvfp4", torch.bfloat16, DEVICE)
    inputs["shards"] = ngram_gather_table(inputs["shards"], DEVICE)
    assert_rows_alone(lambda rows, shards, dtype: launch_gather(rows, shards, dtype), inputs, ("rows",))


def test_pageable_memory_is_refused() -> None:
    """A kernel that reads it faults, and takes the process with it."""
    shards = [quantize(torch.ones(3, 16), "bf16")]
    with pytest.raises(ValueError, match=r"shard 0 .*pageable memory.*pin it.*cudaHostRegister"):
        ngram_gather_table(shards, "cuda")


@pytest.mark.parametrize(
    ("formats", "heights", "message"),
    [
        (["bf16", "fp32"], [3, 3], "one height, width and format"),
        (["bf16", "bf16", "bf16"], [3, 2, 3], "one height, width and format"),
        (["bf16", "bf16"], [3, 4], "one height, width and format"),
        (["mxfp8"], [3], "one of bf16, fp32, fp8_tensor, nvfp4"),
        ([], [], "at least one shard"),
    ],
)
def test_shards_that_are_no_table_are_refused(formats: list[str], heights: list[int], message: str) -> None:
    shards = [quantize(torch.ones(h, 32), name) for name, h in zip(formats, heights, strict=True)]
    with pytest.raises(ValueError, match=message):
        ngram_gather_table(shards, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("name", TABLE_FORMATS)
def test_rows_are_read_from_pinned_memory(name: str) -> None:
    """Shards in turn on the device and pinned; unprepared ones on the device go through torch."""
    inputs = ngram_gather_inputs(80, 16, 160, 1001, 4, name, torch.bfloat16, DEVICE)
    wanted = ngram_gather(**inputs)
    table = fenced_table(inputs, pinned=True)
    assert [s.data.device.type for s in table.shards] == ["cuda", "cpu"] * 2
    assert_same(ngram_gather(inputs["rows"], table, torch.bfloat16), wanted)
