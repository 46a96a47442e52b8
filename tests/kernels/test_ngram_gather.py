"""Table rows, from shards of every format."""

import pytest
import torch

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels.ngram_gather import ngram_gather, ngram_gather_inputs
from tests.kernels.compare import assert_rows_alone, assert_same, assert_within, decoded, twin, with_weights
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
