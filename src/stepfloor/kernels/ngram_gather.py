"""Gather rows of the n-gram table, stored in shards of one height, and decode them.

A row's decoded values are float32 products of code and scale, rounded once to the model's dtype; the FP8 table's
scale is one number for the whole table, the NVFP4 table's are one per 16 values and one per table.

On a GPU one kernel reads the rows where they lie, in device memory or through the bus in pinned host memory; it knows
the shards by a list of addresses, made once at load (`ngram_gather_table`).

Source: transformers 5.24, Qwen4ExpTextNGramEmbedding (embedding look-up); table variants of the releases.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._jit import dependent_launch, runs_triton, start, tl, triton
from stepfloor.kernels._product import decode_e4m3, decode_fp4

logger = logging.getLogger(__name__)

TABLE_FORMATS = ("bf16", "fp32", "fp8_tensor", "nvfp4")
BLOCK_ROWS = 4


@dataclass(frozen=True, slots=True, eq=False)
class GatherTable:
    """Where the kernel finds the rows of a table. Make it with `ngram_gather_table`.

    shards           the tensors themselves, so that their memory stays
    height, width    rows of a shard, the last of which may have fewer; values of a row
    format           of every shard
    data, scales     int64 [shards] on the device: addresses of codes and, for nvfp4, of block scales
    factors          float32 [shards]: the scale of fp8_tensor, scale_2 of nvfp4, else 1
    alignment        bytes that divide the address of every row
    """

    shards: tuple[PackedWeight, ...]
    height: int
    width: int
    format: str
    data: Tensor
    scales: Tensor
    factors: Tensor
    alignment: int

    @property
    def rows(self) -> int:
        """Rows of all shards."""
        return sum(shard.shape[0] for shard in self.shards)


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


def ngram_gather(rows: Tensor, shards: Sequence[PackedWeight] | GatherTable, dtype: torch.dtype) -> Tensor:
    """Read each token's rows side by side.

    rows    [.., heads] int64, each a row of the table
    shards  tables [height, width], or what `ngram_gather_table` made of them; shard i starts at row i * height, the
            last may be shorter
    dtype   of the result
    Returns [.., heads * width]. Raises ValueError without a shard.
    """
    if isinstance(shards, GatherTable):
        if runs_triton(rows):
            return launch_gather(rows, shards, dtype)
        shards = shards.shards
    elif runs_triton(rows):
        _stays_with_torch("its shards are not prepared (ngram_gather_table)")
    if not shards:
        raise ValueError("ngram_gather wants at least one shard; got none")
    return ngram_gather_reference(rows, shards, dtype)


def ngram_gather_table(shards: Sequence[PackedWeight], device: str | torch.device) -> GatherTable:
    """Note where the shards of a table lie; once, at load. Nothing is copied but their addresses and factors.

    shards  as `ngram_gather` takes them. For a CUDA device each lies in its memory or in pinned host memory, which
            kernels read at the address the host uses. Pageable and mapped memory is refused, because whether to pin it
            in place, copy it into pinned memory or move it to the device is a question of room, which is the caller's.
    device  of the rows that will be gathered
    Raises ValueError for memory that the device cannot read, shards that do not fit together, another format.
    """
    target = torch.device(device)
    if not shards:
        raise ValueError("ngram_gather_table wants at least one shard; got none")
    first = shards[0]
    height, width = first.shape
    full = all(s.shape[0] == height for s in shards[:-1]) and shards[-1].shape[0] <= height
    if (
        first.format not in TABLE_FORMATS
        or not full
        or any((s.format, s.shape[1]) != (first.format, width) for s in shards)
    ):
        raise ValueError(
            f"an n-gram table has shards of one height, width and format, one of {', '.join(TABLE_FORMATS)}; got "
            f"{sorted({(s.format, s.shape) for s in shards})}"
        )
    for index, shard in enumerate(shards):
        for part in (shard.data, shard.scale if first.format == "nvfp4" else None):
            if part is not None:
                _check_readable(part, f"shard {index} of the n-gram table", target)
    data = [s.data.data_ptr() for s in shards]
    scales = [s.scale.data_ptr() if first.format == "nvfp4" and s.scale is not None else 0 for s in shards]
    return GatherTable(
        tuple(shards),
        height,
        width,
        first.format,
        torch.tensor(data, dtype=torch.int64, device=target),
        torch.tensor(scales, dtype=torch.int64, device=target),
        torch.tensor([_factor(s) for s in shards], dtype=torch.float32, device=target),
        math.gcd(16, first.data[0].numel() * first.data.element_size(), *data),
    )


def launch_gather(rows: Tensor, table: GatherTable, dtype: torch.dtype) -> Tensor:
    """Queue the kernel."""
    count = rows.numel()
    out = torch.empty((*rows.shape[:-1], rows.shape[-1] * table.width), dtype=dtype, device=rows.device)
    _ngram_gather_kernel[(-(-count // BLOCK_ROWS),)](
        rows.contiguous(),
        table.data,
        table.scales,
        table.factors,
        out,
        count,
        table.height,
        WIDTH=table.width,
        FORMAT=table.format,
        ALIGNMENT=table.alignment,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_WIDTH=triton.next_power_of_2(table.width),
        **dependent_launch(rows),
    )
    return out


@triton.jit
def _at_address(anchor_ptr, address, element_type: tl.constexpr, ALIGNMENT: tl.constexpr):
    # A cast from an integer to a pointer would do, but the compiler then forgets the alignment and reads byte by byte;
    # the distance from a pointer it knows keeps it: 8 bytes a lane in Triton 3.6 and 3.9.
    distance = tl.multiple_of(address - anchor_ptr.to(tl.int64), ALIGNMENT)
    return (anchor_ptr.to(tl.pointer_type(tl.uint8)) + distance).to(tl.pointer_type(element_type))


@triton.jit
def _ngram_gather_kernel(
    rows_ptr,
    data_ptr,
    scales_ptr,
    factors_ptr,
    out_ptr,
    count,
    height,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: BLOCK_ROWS of all T * heads rows.
    start(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = at < count
    row = tl.load(rows_ptr + at, mask=live, other=0)
    shard = row // height
    local = row - shard * height
    base = tl.load(data_ptr + shard)
    column = tl.arange(0, BLOCK_WIDTH)
    inside = live[:, None] & (column < WIDTH)[None, :]
    if FORMAT == "nvfp4":
        factor = tl.load(factors_ptr + shard)
        byte = tl.arange(0, BLOCK_WIDTH // 2)
        stored = live[:, None] & (byte < WIDTH // 2)[None, :]
        codes_ptr = _at_address(data_ptr, base + local * (WIDTH // 2), tl.uint8, ALIGNMENT)
        packed = tl.load(codes_ptr[:, None] + byte[None, :], mask=stored, other=0).to(tl.int32)
        blocks_ptr = _at_address(data_ptr, tl.load(scales_ptr + shard) + local * (WIDTH // 16), tl.uint8, 1)
        block = tl.load(blocks_ptr[:, None] + byte[None, :] // 8, mask=stored, other=0)
        scale = decode_e4m3(block) * factor[:, None]
        # the low nibble is the even value
        pairs = tl.join(decode_fp4(packed & 15) * scale, decode_fp4(packed >> 4) * scale)
        value = tl.reshape(pairs, (BLOCK_ROWS, BLOCK_WIDTH))
    elif FORMAT == "fp8_tensor":
        codes_ptr = _at_address(data_ptr, base + local * WIDTH, tl.uint8, ALIGNMENT)
        code = tl.load(codes_ptr[:, None] + column[None, :], mask=inside, other=0)
        value = decode_e4m3(code) * tl.load(factors_ptr + shard)[:, None]
    elif FORMAT == "bf16":
        values_ptr = _at_address(data_ptr, base + local * (WIDTH * 2), tl.bfloat16, ALIGNMENT)
        value = tl.load(values_ptr[:, None] + column[None, :], mask=inside, other=0)
    else:
        values_ptr = _at_address(data_ptr, base + local * (WIDTH * 4), tl.float32, ALIGNMENT)
        value = tl.load(values_ptr[:, None] + column[None, :], mask=inside, other=0)
    to_ptr = out_ptr + at[:, None] * WIDTH + column[None, :]
    tl.store(to_ptr, value.to(out_ptr.dtype.element_ty), mask=inside)


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


def _factor(shard: PackedWeight) -> float:
    scale = {"fp8_tensor": shard.scale, "nvfp4": shard.scale_2}.get(shard.format)
    return 1.0 if scale is None else float(scale)


def _check_readable(part: Tensor, name: str, device: torch.device) -> None:
    if not part.is_contiguous():
        raise ValueError(f"{name} is not contiguous: strides {part.stride()} of shape {tuple(part.shape)}")
    there = part.device.type == device.type and device.index in (None, part.device.index)
    if not there and not (device.type == "cuda" and part.is_pinned()):
        raise ValueError(
            f"{name} lies in {'pageable memory' if part.device.type == 'cpu' else part.device}, which a kernel on "
            f"{device} cannot read; pin it (Tensor.pin_memory, or cudaHostRegister for a mapped file) or move it there"
        )


@cache
def _stays_with_torch(reason: str) -> None:
    logger.info("ngram_gather stays with torch: %s", reason)
