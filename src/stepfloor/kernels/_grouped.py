"""Products of rows with the matrices of their experts, any stored format, any shape: what the Triton kernels share.

A program owns a tile of results: some rows of one expert's matrix by some of the pairs (row, choice) that chose it. In
a decode step it finds these pairs itself, from the ids: the first of every BLOCK_M pairs of an expert leads, and the
programs of all others end at once. For many rows torch sorts the pairs first. Either way nobody asks the host.

Codes become bf16 without loss, with the scales of blocks of 16 or 32 columns multiplied in; other scales are float32
factors of the sums. So a product has the reference's operands and one rounding, and differs by the order of its sums,
which depends on the shape and on which of the two ways was taken, never on the rows beside it.

Source: formats.codec for the formats.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._experts import TiledExperts, decode_experts
from stepfloor.kernels._jit import tl, triton
from stepfloor.kernels._stream import say_once

logger = logging.getLogger(__name__)

DECODE_ROWS = 80
# Experts decoded to bf16 at once, 839 MB of gate and up: a slice of 8192 rows is then more than ten waves of programs,
# and the last, unfilled wave costs little; all 512 at once would hold 3.4 GB for a few percent.
EXPERTS_AT_ONCE = 128
CHUNKS = (64, 256)  # pairs that a decode program looks at together; two kernels serve every number of rows


@dataclass(frozen=True, slots=True)
class Tiles:
    """Results of a program (rows of x, rows of the matrix: `columns`), columns of K in a step; Triton's options."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def fit(self, n: int, k: int) -> "Tiles":
        """The same, no larger than a matrix [n, k] can fill."""
        columns = min(self.columns, max(16, triton.next_power_of_2(n)))
        depth = min(self.depth, max(32, triton.next_power_of_2(k)))
        return Tiles(self.rows, columns, depth, self.warps, self.stages)


# float32 products have no matrix units, and tiles must fit in registers
WIDE = Tiles(16, 32, 32, 4, 2)


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """E matrices [N, K] as the kernels read them.

    codes    plain: data are values; fp8: E4M3 codes; mxfp8: with a power of two for 32; nvfp4: FP4 with E4M3 for 16
    scaling  what multiplies the sums: none, row (factor [E, N]), block ([E, N / 128, K / 128]) or expert ([E])
    """

    shape: tuple[int, int]
    count: int
    codes: str
    scaling: str
    data: Tensor
    scale: Tensor | None
    factor: Tensor | None

    def wide(self, x: Tensor) -> bool:
        """Whether products with x are float32 ones."""
        return x.dtype != torch.bfloat16 or self.data.dtype == torch.float32

    def constants(self, x: Tensor) -> dict[str, Any]:
        """Constants of a kernel that multiplies x by these matrices."""
        native = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 9)
        return {"N": self.shape[0], "K": self.shape[1], "CODES": self.codes, "SCALING": self.scaling} | {
            "WIDE": self.wide(x),
            "NATIVE": native,
        }


_SCALINGS = {
    "bf16": ("plain", "none"),
    "fp32": ("plain", "none"),
    "fp8_channel": ("fp8", "row"),
    "fp8_block": ("fp8", "block"),
    "fp8_tensor": ("fp8", "expert"),
    "mxfp8": ("mxfp8", "none"),
    "nvfp4": ("nvfp4", "expert"),
}


def why_not_grouped(weight: PackedWeight) -> str | None:
    """What keeps matrices from the kernels here, as the end of a sentence; None if nothing does."""
    if weight.format not in _SCALINGS:
        return f"it decodes no {weight.format}"
    if not weight.data.is_contiguous() or not (weight.scale is None or weight.scale.is_contiguous()):
        return "it reads matrices without gaps"
    return None


def runs_grouped(operator: str, has_triton: bool, reason: str | None) -> bool:
    """Whether a GPU runs an operator here, not its reference; why not is said once.

    reason  what why_not_grouped says of its matrices
    """
    reason = reason if has_triton else "Triton is not installed"
    if reason is not None:
        say_once(logger, f"{operator} runs its reference: {reason}")
    return reason is None


def stack_of(weight: PackedWeight) -> Stack:
    """A matrix, or a stack of them, as the kernels read it; nothing is copied."""
    codes, scaling = _SCALINGS[weight.format]
    count = weight.data.shape[0] if weight.data.ndim == 3 else 1
    data = weight.data if codes == "plain" else weight.data.view(torch.uint8)
    scale, factor = (weight.scale, None) if scaling == "none" else (None, weight.scale)
    if codes == "nvfp4" and weight.scale is not None and weight.scale_2 is not None:
        scale, factor = weight.scale.view(torch.uint8), weight.scale_2.reshape(-1)
    return Stack(weight.shape, count, codes, scaling, data, scale, factor)


def stacks(weight: PackedWeight | TiledExperts) -> Iterator[tuple[int, Stack]]:
    """Experts as the kernels read them, with the number of the first; tiled ones some at a time, decoded to bf16.

    The memory of a slice is that of the slice before: use it before asking for the next.
    """
    if isinstance(weight, PackedWeight):
        yield 0, stack_of(weight)
        return
    count, (n, k) = weight.tape.shape[0], weight.shape
    held = torch.empty((min(count, EXPERTS_AT_ONCE), n, k), dtype=torch.bfloat16, device=weight.tape.device)
    for first in range(0, count, EXPERTS_AT_ONCE):
        some = held[: min(EXPERTS_AT_ONCE, count - first)]
        factor = decode_experts(weight, first, some)
        _, scaling = _SCALINGS[weight.format]
        yield first, Stack(weight.shape, some.shape[0], "plain", scaling, some, None, factor)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Pairs sorted by expert, cut into tiles of as many pairs as a program takes. int32, on the device of the ids.

    order         [P] pairs (row * topk + choice), by expert and then as they were
    pair_starts   [E + 1] place of an expert's first pair in order; tile_starts  [E + 1] its first tile
    tile_experts  [tiles that there are at most] expert of a tile; beyond the last, of no meaning
    """

    order: Tensor
    pair_starts: Tensor
    tile_starts: Tensor
    tile_experts: Tensor


def group_pairs(ids: Tensor, experts: int, rows: int) -> Groups:
    """Sort the pairs of ids [T, topk] by expert, `rows` pairs a tile."""
    chosen = ids.reshape(-1).clamp(0, experts - 1).to(torch.int32)
    values, order = chosen.sort(stable=True)
    each = torch.arange(experts + 1, dtype=torch.int32, device=ids.device)
    pair_starts = torch.searchsorted(values, each, out_int32=True)
    tiles = (pair_starts.diff() + (rows - 1)) // rows
    tile_starts = F.pad(tiles.cumsum(0, dtype=torch.int32), (1, 0))
    most = torch.arange(most_tiles(ids.numel(), experts, rows), dtype=torch.int32, device=ids.device)
    tile_experts = torch.searchsorted(tile_starts[1:], most, right=True, out_int32=True).clamp(max=experts - 1)
    return Groups(order.to(torch.int32), pair_starts, tile_starts, tile_experts)


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Tiles that so many pairs can take: each expert leaves one unfilled."""
    return pairs // rows + min(experts, pairs)


def chunk_of(pairs: int) -> int:
    """Pairs that a decode program looks at together."""
    return CHUNKS[0] if pairs <= CHUNKS[0] else CHUNKS[1]


@triton.jit
def expert_of(ids_ptr, pair, EXPERTS: tl.constexpr):
    """The expert of a pair; ids of padding rows may be anything."""
    return tl.minimum(tl.maximum(tl.load(ids_ptr + pair), 0), EXPERTS - 1).to(tl.int32)


@triton.jit
def pairs_before(ids_ptr, pair, expert, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """How many pairs before this one chose the same expert."""
    found = 0
    for first in range(0, pair, CHUNK):
        p = first + tl.arange(0, CHUNK)
        other = tl.load(ids_ptr + p, mask=p < pair, other=0)
        same = (tl.minimum(tl.maximum(other, 0), EXPERTS - 1) == expert) & (p < pair)
        found += tl.sum(same.to(tl.int32), 0)
    return found


@triton.jit
def pairs_led(ids_ptr, pair, pairs, expert, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr):
    """This pair and the next ones that chose its expert, BLOCK_M at most, and which places are taken."""
    slot = tl.arange(0, BLOCK_M)
    member = tl.zeros((BLOCK_M,), tl.int32)  # pair + 1
    seen = 0
    for first in range(pair // CHUNK * CHUNK, pairs, CHUNK):
        p = first + tl.arange(0, CHUNK)
        other = tl.load(ids_ptr + p, mask=p < pairs, other=0)
        same = (tl.minimum(tl.maximum(other, 0), EXPERTS - 1) == expert) & (p >= pair) & (p < pairs)
        count = same.to(tl.int32)
        place = tl.where(same, seen + tl.cumsum(count, 0) - 1, -1)
        member += tl.sum(tl.where(place[None, :] == slot[:, None], p[None, :] + 1, 0), 1)
        seen += tl.sum(count, 0)
    return tl.maximum(member - 1, 0), member > 0


@triton.jit
def pairs_of_tile(order_ptr, pair_starts_ptr, tile_starts_ptr, expert, tile, BLOCK_M: tl.constexpr):
    """The pairs of a tile, which is one of this expert's, and which places are taken."""
    index = tile - tl.load(tile_starts_ptr + expert)
    place = tl.load(pair_starts_ptr + expert) + index * BLOCK_M + tl.arange(0, BLOCK_M)
    live = place < tl.load(pair_starts_ptr + expert + 1)
    return tl.load(order_ptr + place, mask=live, other=0), live


@triton.jit
def _from_e4m3(codes):
    """float32 values of E4M3 codes in uint8: bits moved into a float16, whose exponent is 2**-8 of theirs."""
    half = ((codes & 0x80).to(tl.uint16) << 8) | ((codes & 0x7F).to(tl.uint16) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _from_fp4(codes):
    """float32 values of FP4 codes, the same way."""
    half = ((codes & 8).to(tl.uint16) << 12) | ((codes & 7).to(tl.uint16) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _matrix(
    data_ptr,
    scale_ptr,
    row,
    first,
    K: tl.constexpr,
    CODES: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_N, BLOCK_K] values of some rows of one matrix from a column on, zero beyond the last."""
    if CODES == "nvfp4":
        byte = first // 2 + tl.arange(0, BLOCK_K // 2)
        at = row[:, None] * (K // 2) + byte[None, :]
        packed = tl.load(data_ptr + at, mask=byte[None, :] < K // 2, other=0)
        values = _from_fp4(tl.interleave(packed & 15, packed >> 4))
        block = first // 16 + tl.arange(0, BLOCK_K // 16)
        at = row[:, None] * (K // 16) + block[None, :]
        scales = _from_e4m3(tl.load(scale_ptr + at, mask=block[None, :] < K // 16, other=0))
        values = tl.reshape(values, (BLOCK_N, BLOCK_K // 16, 16)) * scales[:, :, None]
        values = tl.reshape(values, (BLOCK_N, BLOCK_K))
    else:
        k = first + tl.arange(0, BLOCK_K)
        at = row[:, None] * K + k[None, :]
        if K % BLOCK_K == 0:
            values = tl.load(data_ptr + at)
        else:
            values = tl.load(data_ptr + at, mask=k[None, :] < K, other=0)
        if CODES != "plain":
            if NATIVE:
                values = values.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
            else:
                values = _from_e4m3(values)
        if CODES == "mxfp8":
            block = first // 32 + tl.arange(0, BLOCK_K // 32)
            at = row[:, None] * (K // 32) + block[None, :]
            power = tl.load(scale_ptr + at, mask=block[None, :] < K // 32, other=0).to(tl.uint32) << 23
            power = power.to(tl.float32, bitcast=True)
            values = tl.reshape(values, (BLOCK_N, BLOCK_K // 32, 32)).to(tl.float32) * power[:, :, None]
            values = tl.reshape(values, (BLOCK_N, BLOCK_K))
    return values.to(tl.float32 if WIDE else tl.bfloat16)


@triton.jit
def _add_product(sums, w, x, factor_ptr, row, first, K: tl.constexpr, SCALING: tl.constexpr):
    """sums + w x, a step's part of it."""
    if SCALING == "block":
        factor = tl.load(factor_ptr + row // 128 * ((K + 127) // 128) + first // 128).to(tl.float32)
        sums += tl.dot(w, x, input_precision="ieee") * factor[:, None]
    else:
        sums = tl.dot(w, x, sums, input_precision="ieee")
    return sums


@triton.jit
def _scaled(sums, factor_ptr, expert, row, N: tl.constexpr, SCALING: tl.constexpr):
    """The sums times the factors of a row or of an expert, where the format has them."""
    if SCALING == "row":
        sums *= tl.load(factor_ptr + expert * N + row).to(tl.float32)[:, None]
    if SCALING == "expert":
        sums *= tl.load(factor_ptr + expert).to(tl.float32)
    return sums


@triton.jit
def expert_products(
    x_ptr,
    x_stride,
    row_of_x,
    live,
    data_ptr,
    scale_ptr,
    factor_ptr,
    expert,
    n,
    N: tl.constexpr,
    K: tl.constexpr,
    CODES: tl.constexpr,
    SCALING: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """float32 [BLOCK_N, BLOCK_M]: rows n of an expert's matrix times rows of x; PAIRED: and rows n + N / 2.

    Rows past the last repeat it, so that nothing is read outside; nobody may store what they give.
    """
    # the matrix is the left operand: decoded codes may then stay in registers
    expert = expert.to(tl.int64)
    data_ptr += expert * (N * (K // 2 if CODES == "nvfp4" else K))
    if CODES == "nvfp4":
        scale_ptr += expert * (N * (K // 16))
    if CODES == "mxfp8":
        scale_ptr += expert * (N * (K // 32))
    blocks_ptr = factor_ptr
    if SCALING == "block":
        blocks_ptr += expert * (((N + 127) // 128) * ((K + 127) // 128))
    half: tl.constexpr = N // 2
    row = tl.minimum(n, (half if PAIRED else N) - 1)
    x_ptr += row_of_x.to(tl.int64)[None, :] * x_stride
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    more = sums
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        if K % BLOCK_K == 0:
            x = tl.load(x_ptr + k[:, None], mask=live[None, :], other=0.0)
        else:
            x = tl.load(x_ptr + k[:, None], mask=live[None, :] & (k[:, None] < K), other=0.0)
        x = x.to(tl.float32 if WIDE else tl.bfloat16)
        w = _matrix(data_ptr, scale_ptr, row, first, K, CODES, WIDE, NATIVE, BLOCK_N, BLOCK_K)
        sums = _add_product(sums, w, x, blocks_ptr, row, first, K, SCALING)
        if PAIRED:
            w = _matrix(data_ptr, scale_ptr, row + half, first, K, CODES, WIDE, NATIVE, BLOCK_N, BLOCK_K)
            more = _add_product(more, w, x, blocks_ptr, row + half, first, K, SCALING)
    sums = _scaled(sums, factor_ptr, expert, row, N, SCALING)
    if PAIRED:
        more = _scaled(more, factor_ptr, expert, row + half, N, SCALING)
    return sums, more
