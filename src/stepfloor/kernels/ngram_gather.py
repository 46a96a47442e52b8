"""Gather rows of the n-gram table, stored in shards of one height, and decode them.

A row's decoded values are float32 products of code and scale, rounded once to the model's dtype; the FP8 table's
scale is one number for the whole table, the NVFP4 table's are one per 16 values and one per table.

Source: transformers 5.24, Qwen4ExpTextNGramEmbedding (embedding look-up); table variants of the releases.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize


def ngram_gather_reference(rows: Tensor, shards: Sequence[PackedWeight], dtype: torch.dtype) -> Tensor:
    """One indexing per shard that is touched, so that only the pages read are ever resident."""
    height, width = shards[0].shape
    flat = rows.flatten()
    out = torch.empty((flat.shape[0], width), dtype=dtype, device=rows.device)
    if len(shards) == 1:
        out = _decode(shards[0], flat, dtype)
    else:
        owner = flat // height
        for index in owner.unique().tolist():
            mine = (owner == index).nonzero().squeeze(1)
            out[mine] = _decode(shards[index], flat[mine] - index * height, dtype)
    return out.reshape(*rows.shape[:-1], -1)


def ngram_gather(rows: Tensor, shards: Sequence[PackedWeight], dtype: torch.dtype) -> Tensor:
    """Read each token's rows side by side.

    rows    [.., heads] int64
    shards  tables [height, width]; shard i starts at row i * height, the last may be shorter
    dtype   of the result
    Returns [.., heads * width]. Raises ValueError without a shard.
    """
    if not shards:
        raise ValueError("ngram_gather wants at least one shard; got none")
    return ngram_gather_reference(rows, shards, dtype)


def ngram_gather_inputs(
    t: int, heads: int, width: int, height: int, parts: int, format_name: str, dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)
    table = quantize(torch.randn(height * parts, width, generator=make, device=device), format_name)
    return {
        "rows": torch.randint(0, height * parts, (t, heads), generator=make, device=device),
        "shards": tuple(_rows_of(table, torch.arange(i * height, (i + 1) * height)) for i in range(parts)),
        "dtype": dtype,
    }


def _rows_of(table: PackedWeight, rows: Tensor) -> PackedWeight:
    # fp8's scale is one number for the table; nvfp4's block scales go with their rows
    scale = table.scale[rows] if table.format == "nvfp4" and table.scale is not None else table.scale
    return replace(table, shape=(rows.shape[0], table.shape[1]), data=table.data[rows], scale=scale)


def _decode(table: PackedWeight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    return _rows_of(table, rows).dequantize().to(dtype)
