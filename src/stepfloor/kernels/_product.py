"""The portable product on a GPU, y = x Wᵀ for every stored format, and the number formats it decodes, in Triton.

What the streamed kernels refuse comes here: small models, other formats, other GPUs. Up to MAX_ROWS rows a value is
summed in an order that N and K alone decide: rows go through tiles of 16, K through slices that are added in order. So
its bits depend neither on how many rows there are nor on where a row lies. More rows are prefill, and the library's.

Codes are exact in bf16, and so are their products with block scales of MXFP8 and NVFP4; other scales multiply float32
sums. Activations are never quantized. Where x or W is float32 the products are float32 too.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._jit import dependent_launch, start, tl, triton

MAX_ROWS = 80  # more rows are prefill: the library multiplies
TILE_ROWS = 16
BLOCK_N = 32
PROGRAMS = 128  # a narrow matrix is cut along K until it has so many, but no slice is shorter than LEAST_K
LEAST_K = 512


def packed_product(x: Tensor, weights: Sequence[PackedWeight]) -> Tensor:
    """Rows through one or more matrices that share them, on a GPU.

    x [.., K]; weights matrices [N_i, K]. Returns [.., sum of N_i] in the dtype of x.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] > MAX_ROWS:
        parts = [library_product(rows, w) for w in weights]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    else:
        out = rows.new_empty((rows.shape[0], sum(w.shape[0] for w in weights)))
        at = 0
        for w in weights:
            launch_product(rows, w, out[:, at : at + w.shape[0]])
            at += w.shape[0]
    return out.reshape(*x.shape[:-1], out.shape[1])


def library_product(x: Tensor, weight: PackedWeight) -> Tensor:
    """The library's product of many rows. A quantized matrix is rounded to the dtype of x after its scale.

    In bf16 that moves a weight by at most 2**-9 of itself, a sixteenth of what FP8 did, for ten times the speed of
    float32.
    """
    if weight.format == "fp32":
        return F.linear(x.float(), weight.data).to(x.dtype)
    matrix = weight.data if weight.format == "bf16" else weight.dequantize()
    return dense_product(x, matrix.to(x.dtype))


def dense_product(x: Tensor, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """The library's product of x [T, K] and matrix [N, K] in one dtype, float32 inside and rounded once.

    Left to itself, cuBLAS cuts K for some shapes (100 rows and 513 columns, say) and rounds the parts to bf16 before it
    adds them: values are then off by twice the bound of one rounding (H200). The setting is the process's: put back.
    """
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    try:
        return torch.mm(x, matrix.T, out=out)
    finally:
        settings.allow_bf16_reduced_precision_reduction = before


def slices_of(n: int, k: int) -> int:
    """Slices of K for a matrix [N, K]."""
    return max(1, min(-(-PROGRAMS // -(-n // BLOCK_N)), k // LEAST_K))


def launch_product(x: Tensor, weight: PackedWeight, out: Tensor) -> None:
    """Queue x [T, K] times a matrix [N, K] into out [T, N], whose rows may be parts of longer ones."""
    n, k = weight.shape
    if x.stride(-1) != 1:
        x = x.contiguous()
    count = x.shape[0]
    wide = x.dtype != torch.bfloat16 or weight.format == "fp32"
    block_k = 64 if wide else 128
    slices = slices_of(n, k)
    steps = -(-k // (block_k * slices))
    to = out if slices == 1 else x.new_empty((slices, count, n), dtype=torch.float32)
    grid = (-(-n // BLOCK_N), -(-count // TILE_ROWS), slices)
    _product_kernel[grid](
        x,
        codes_of(weight.data),
        None if weight.scale is None else codes_of(weight.scale.contiguous()),
        weight.scale_2,
        to,
        count,
        n,
        k,
        steps,
        x.stride(0),
        to.stride(-2),
        FORMAT=weight.format,
        WIDE=wide,
        ROWS=TILE_ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3,
        **dependent_launch(x),
    )
    if slices > 1:
        block = 256
        grid = (-(-n // block), count)
        _add_slices_kernel[grid](to, out, count, n, out.stride(0), SLICES=slices, BLOCK=block, **dependent_launch(x))


def codes_of(data: Tensor) -> Tensor:
    """The tensor as kernels read it: FP8 as bytes, whatever name torch has for them."""
    return data.contiguous().view(torch.uint8) if data.dtype == torch.float8_e4m3fn else data.contiguous()


@triton.jit
def decode_e4m3(code):
    """FP8 bytes to float32."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def decode_fp4(code):
    """Codes 0 to 15, int32, to float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    exponent = (code >> 1) & 3
    digit = code & 1
    # (2 + digit) 2**exponent quarters; halves where the exponent is 0
    size = tl.where(exponent == 0, 2 * digit, (2 + digit) << exponent).to(tl.float32) * 0.25
    return tl.where(code >= 8, -size, size)


@triton.jit
def power_of_two(exponent):
    """E8M0 bytes to float32: 2 ** (byte - 127)."""
    bits = tl.where(exponent == 0, 1 << 22, exponent.to(tl.int32) << 23)  # 2**-127 is subnormal
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weights(data_ptr, scale_ptr, row, column, inside, k, FORMAT: tl.constexpr):
    """W [rows, columns] at two index vectors, without the scales that multiply sums."""
    if FORMAT == "nvfp4":
        packed = tl.load(data_ptr + row[:, None] * (k // 2) + column[None, :] // 2, mask=inside, other=0)
        code = (packed.to(tl.int32) >> ((column[None, :] & 1) * 4)) & 15
        scale = tl.load(scale_ptr + row[:, None] * (k // 16) + column[None, :] // 16, mask=inside, other=0)
        value = decode_fp4(code) * decode_e4m3(scale)
    else:
        value = tl.load(data_ptr + row[:, None] * k + column[None, :], mask=inside, other=0)
        if value.dtype == tl.uint8:
            value = decode_e4m3(value)
        if FORMAT == "mxfp8":
            scale = tl.load(scale_ptr + row[:, None] * (k // 32) + column[None, :] // 32, mask=inside, other=0)
            value = value * power_of_two(scale)
    return value


@triton.jit(do_not_specialize=["count"])
def _product_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    scale_2_ptr,
    out_ptr,
    count,
    n,
    k,
    steps,
    x_stride,
    out_stride,
    FORMAT: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: 16 rows of x, BLOCK_N rows of W, one slice of K.
    start(PDL)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    slice = tl.program_id(2)
    weight_row = column.to(tl.int64)
    x_row = row.to(tl.int64) * x_stride
    total = tl.full((ROWS, BLOCK_N), 0.0, tl.float32)
    for step in tl.range(slice * steps, slice * steps + steps):
        at = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + x_row[:, None] + at[None, :], mask=(row < count)[:, None] & (at < k)[None, :], other=0)
        w = _weights(data_ptr, scale_ptr, weight_row, at, (column < n)[:, None] & (at < k)[None, :], k, FORMAT)
        if WIDE:
            part = tl.dot(x.to(tl.float32), tl.trans(w.to(tl.float32)), input_precision="ieee")
        else:
            part = tl.dot(x, tl.trans(w.to(tl.bfloat16)))
        if FORMAT == "fp8_block":
            # the last slice may go on behind K, where x reads as zero
            block = weight_row // 128 * ((k + 127) // 128) + tl.minimum(step * BLOCK_K, k - 1) // 128
            part = part * tl.load(scale_ptr + block, mask=column < n, other=0).to(tl.float32)[None, :]
        total += part
    if FORMAT == "fp8_channel":
        total = total * tl.load(scale_ptr + column, mask=column < n, other=0).to(tl.float32)[None, :]
    if FORMAT == "fp8_tensor":
        total = total * tl.load(scale_ptr).to(tl.float32)
    if FORMAT == "nvfp4":
        total = total * tl.load(scale_2_ptr)
    out_row = (slice * count + row).to(tl.int64) * out_stride
    value = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_row[:, None] + column[None, :], value, mask=(row < count)[:, None] & (column < n)[None, :])


@triton.jit(do_not_specialize=["count"])
def _add_slices_kernel(
    part_ptr, out_ptr, count, n, out_stride, SLICES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    start(PDL)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    total = tl.load(part_ptr + row * n + column, mask=column < n, other=0.0)
    for slice in tl.static_range(1, SLICES):
        total += tl.load(part_ptr + (slice * count + row) * n + column, mask=column < n, other=0.0)
    tl.store(out_ptr + row * out_stride + column, total.to(out_ptr.dtype.element_ty), mask=column < n)
