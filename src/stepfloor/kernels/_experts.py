"""What the routed experts' kernels share: NVFP4 and FP8 matrices in streamed order, and the size of their list.

Source: include/expert_sums.cuh, which reads these bytes and describes a step; formats.codec for the formats as stored.
"""

import struct
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._jit import Launch, compile_cuda, device_arch, missing_for_cuda

CAPACITIES = (1, 2, 4, 8, 16, 80)  # most rows of each kernel
MAX_ROWS = CAPACITIES[-1]
SHARED_LIMIT = 227 * 1024
SHARED_LIMIT_OF_TWO = 113 * 1024
FORMATS = {"nvfp4": 0, "fp8_channel": 1, "fp8_block": 2}  # EXPERT_FORMAT of the kernels
SCALE_REST = 128.0  # what decoded values lack, as in include/experts.cuh
# by how much decode_eight turns the first word, the second or the two joined (2) for each pair of 2 * 8 codes
_TURNS = ((0, 0), (0, 6), (0, 12), (2, 4), (1, 2), (1, 8), (1, 14), (2, 10))
_JOINED_FROM_FIRST = (4, 5, 13, 14)  # bits of either half; the other ones are the second word's


def _bits_of_codes() -> list[list[tuple[int, int]]]:
    """Word and bit of each of 16 codes' sign and other three bits, highest first."""
    found: list[list[tuple[int, int]]] = []
    for source, turn in _TURNS:
        for half in (0, 16):  # the even column's
            bits = [(half + bit - turn) % 32 for bit in (15, 8, 7, 6)]
            found.append([(source if source < 2 else int(bit % 16 not in _JOINED_FROM_FIRST), bit) for bit in bits])
    return found


FP4_BITS_AT = _bits_of_codes()


@dataclass(frozen=True, slots=True, eq=False)
class TiledExperts:
    """Matrices [N, K] of E experts as the kernels stream them: [E][tile of 16 rows][slice of K][step].

    paired  whether a tile is 8 rows of the upper half of N and the 8 rows of the lower half that belong to them
    slices  parts of K, each of `steps` times 64 columns, padded with zeros
    tape    uint8 [E, tiles, slices, bytes of a piece]
    scale   float32, what multiplies sums: [E] in nvfp4, [E, N] or [E, N / 128, K / 128] in FP8, which the tape has too
    format  in FORMATS
    """

    shape: tuple[int, int]
    paired: bool
    slices: int
    steps: int
    tape: Tensor
    scale: Tensor
    cache_dir: Path
    format: str = "nvfp4"

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.tape.numel() + 4 * self.scale.numel()

    def unpack(self) -> PackedWeight:
        """The matrices as they were stored, copied; codes under a scale of zero come back as zero."""
        return unpack_experts(self)


def pack_experts(weight: PackedWeight, slices: int, paired: bool, cache_dir: Path) -> TiledExperts:
    """Reorder experts on their device; the bytes stay as many where K is a multiple of 64 * slices, but for what FP8
    repeats of its scales, an eightieth at most.
    """
    if weight.format not in FORMATS or weight.scale is None:
        raise ValueError(f"pack_experts wants experts in one of {', '.join(FORMATS)}; got {weight.format}")
    n, k = weight.shape
    steps = -(-k // (64 * slices))
    count = weight.data.shape[0]
    size = piece_bytes(weight.format, steps)
    tape = torch.empty((count, n // 16, slices, size), dtype=torch.uint8, device=weight.data.device)
    if weight.scale_2 is None:
        kept = weight.scale.float().contiguous()
        for first in range(0, count, 8):
            part = slice(first, first + 8)
            tape[part] = _fp8_pieces(weight.data[part].view(torch.uint8), kept[part], slices, steps, paired)
        return TiledExperts(weight.shape, paired, slices, steps, tape, kept, cache_dir, weight.format)
    for first in range(0, count, 8):  # the codes apart take 8 times their bytes
        part = slice(first, first + 8)
        scale = weight.scale[part].float()
        data = weight.data[part]
        codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).to(torch.int32)
        codes = codes.masked_fill((scale == 0).repeat_interleave(16, -1), 0)
        tape[part] = _pieces(codes, scale_bytes(scale), slices, steps, paired)
    return TiledExperts(weight.shape, paired, slices, steps, tape, weight.scale_2.float().contiguous(), cache_dir)


def piece_bytes(format_name: str, steps: int) -> int:
    """Bytes of a tile of 16 rows in one slice."""
    if format_name == "nvfp4":
        return steps * 576
    return steps * 1024 + (64 if format_name == "fp8_channel" else -(-steps * 8 // 16) * 16)


def unpack_experts(tiled: TiledExperts) -> PackedWeight:
    """The inverse of pack_experts; scales of FP8 come back as float32."""
    n, k = tiled.shape
    count, tiles, slices, steps = tiled.tape.shape[0], n // 16, tiled.slices, tiled.steps
    if tiled.format != "nvfp4":
        codes = torch.empty((count, n, k), dtype=torch.uint8, device=tiled.tape.device)
        for first in range(0, count, 8):
            part = slice(first, first + 8)
            lanes = tiled.tape[part, ..., : steps * 1024].reshape(-1, tiles, slices, steps, 2, 8, 4, 2, 8)
            rows = lanes.permute(0, 1, 4, 5, 2, 3, 7, 6, 8).reshape(-1, slices * steps * 64)
            codes[part] = _from_tiles(fp8_values(rows).reshape(-1, tiles, 16, slices * steps * 64), tiled.paired)[
                ..., :k
            ]
        return PackedWeight(tiled.format, tiled.shape, codes.view(torch.float8_e4m3fn), tiled.scale.clone())
    data = torch.empty((count, n, k // 2), dtype=torch.uint8, device=tiled.tape.device)
    scale = torch.empty((count, n, k // 16), dtype=torch.float8_e4m3fn, device=tiled.tape.device)
    for first in range(0, count, 8):
        part = slice(first, first + 8)
        tape = tiled.tape[part]
        words = tape[..., : steps * 512].contiguous().view(torch.int32)
        words = words.reshape(-1, tiles, slices, steps, 8, 4, 2, 2)  # e, tile, slice, step, g, t, half, sub
        codes = fp4_codes(words).unflatten(-1, (2, 8))  # e, tile, slice, step, g, t, half, sub, 8
        codes = codes.permute(0, 1, 6, 4, 2, 3, 7, 5, 8).reshape(-1, tiles, 16, slices * steps * 64)
        held = tape[..., steps * 512 :].reshape(-1, tiles, slices, steps, 8, 2, 4).to(torch.int32)
        held = (held >> 4 | held.roll(-1, -1) << 4 & 255).unflatten(-1, (2, 2))  # ..., sub, half
        held = held.permute(0, 1, 7, 4, 2, 3, 6, 5).reshape(-1, tiles, 16, slices * steps * 4)
        codes, held = _from_tiles(codes, tiled.paired)[..., :k], _from_tiles(held, tiled.paired)[..., : k // 16]
        data[part] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        scale[part] = scale_values(held).to(torch.float8_e4m3fn)
    return PackedWeight("nvfp4", tiled.shape, data, scale, tiled.scale.clone())


def decode_experts(tiled: TiledExperts, first: int, out: Tensor) -> Tensor:
    """Queue decoding of some experts to bf16 out [e, N, K], row-major; returns the float32 scales it leaves out.

    NVFP4's code times block scale is exact in bf16, and so is E4M3's code. On the CPU torch does the same, for tests.
    Scales are [e] in nvfp4, else those of `tiled.scale`.
    """
    part = slice(first, first + out.shape[0])
    if out.is_cuda:
        macros = decode_macros(tiled.shape, tiled.slices, tiled.steps, tiled.paired, tiled.format)
        decode_launch(tuple(macros.items()), out.device, tiled.cache_dir)(decode_arguments(tiled, first, out))
    elif tiled.format != "nvfp4":
        out.copy_(replace(tiled, tape=tiled.tape[part], scale=tiled.scale[part]).unpack().data)
    else:
        stored = replace(tiled, tape=tiled.tape[part], scale=torch.full((out.shape[0],), 1 / SCALE_REST)).unpack()
        out.copy_(stored.dequantize())
    return tiled.scale[part] * SCALE_REST if tiled.format == "nvfp4" else tiled.scale[part]


def decode_arguments(tiled: TiledExperts, first: int, out: Tensor) -> bytes:
    """struct Arguments of `_experts.cu`."""
    return pack_pointers((tiled.tape[first:], out), (), out.shape[0])


def decode_macros(
    shape: tuple[int, int], slices: int, steps: int, paired: bool, format_name: str = "nvfp4"
) -> dict[str, int]:
    """The macros that specialise `_experts.cu`."""
    macros = {"N": shape[0], "K": shape[1], "SLICES": slices, "STEPS": steps, "PAIRED": int(paired)}
    return macros | {"EXPERT_FORMAT": FORMATS[format_name]}


@cache
def decode_launch(macros: tuple[tuple[str, int], ...], device: torch.device, cache_dir: Path) -> Launch:
    """The compiled kernel, once a process; eight blocks fill a multiprocessor."""
    cubin = compile_cuda("_experts.cu", dict(macros), device_arch(device), cache_dir)
    blocks = torch.cuda.get_device_properties(device).multi_processor_count * 8
    return Launch(cubin, "decode_experts_kernel", device, blocks, 256, 0)


def _pieces(codes: Tensor, scales: Tensor, slices: int, steps: int, paired: bool) -> Tensor:
    """int32 codes [e, N, K] and scale bytes [e, N, K / 16] to uint8 [e, tiles, slices, steps * 576]."""
    wide = slices * steps * 64
    codes = _to_tiles(F.pad(codes, (0, wide - codes.shape[-1])), paired)
    scales = _to_tiles(F.pad(scales, (0, wide // 16 - scales.shape[-1])), paired)
    count, tiles = codes.shape[:2]
    cut = codes.reshape(count, tiles, 2, 8, slices, steps, 2, 4, 8)  # e, tile, half, g, slice, step, sub, t, 8
    words = fp4_words(cut.permute(0, 1, 4, 5, 3, 7, 2, 6, 8).flatten(-2))  # e, tile, slice, step, g, t, half, sub
    cut = scales.reshape(count, tiles, 2, 8, slices, steps, 2, 2)  # e, tile, half, g, slice, step, sub, block
    held = cut.permute(0, 1, 4, 5, 3, 7, 6, 2).flatten(-2).to(torch.int32)  # lower g, lower g + 8, upper g, upper g + 8
    held = (held << 4 & 255 | held.roll(1, -1) >> 4).to(torch.uint8)
    flat = (count, tiles, slices, -1)
    return torch.cat((words.view(torch.uint8).reshape(flat), held.reshape(flat)), -1)


def fp4_words(codes: Tensor) -> Tensor:
    """int32 FP4 codes [..., 16] to the two int32 words [..., 2] in which decode_eight finds 8 of them each."""
    words = torch.zeros((*codes.shape[:-1], 2), dtype=torch.int32, device=codes.device)
    for i, places in enumerate(FP4_BITS_AT):
        for rank, (word, at) in enumerate(places):
            words[..., word] |= (codes[..., i] >> (3 - rank) & 1) << at
    return words


def fp4_codes(words: Tensor) -> Tensor:
    """The inverse of fp4_words."""
    codes = torch.zeros((*words.shape[:-1], 16), dtype=torch.int32, device=words.device)
    for i, places in enumerate(FP4_BITS_AT):
        for rank, (word, at) in enumerate(places):
            codes[..., i] |= (words[..., word] >> at & 1) << (3 - rank)
    return codes


def _fp8_pieces(codes: Tensor, scale: Tensor, slices: int, steps: int, paired: bool) -> Tensor:
    """uint8 codes [e, N, K] and float32 scales of rows or blocks to uint8 [e, tiles, slices, bytes of a piece]."""
    count, n, k = codes.shape
    wide = slices * steps * 64
    rows = _to_tiles(F.pad(codes, (0, wide - k)), paired)
    lanes = fp8_lanes(rows.reshape(-1, wide)).reshape(
        count, n // 16, 2, 8, slices, steps, 2, 4, 8
    )  # e, tile, half, g, slice, step, sub, t, 8
    lanes = lanes.permute(0, 1, 4, 5, 2, 3, 7, 6, 8).reshape(count, n // 16, slices, steps * 1024)
    if scale.ndim == 2:
        factors = _to_tiles(scale.unsqueeze(-1), paired).reshape(count, n // 16, 1, 16).expand(-1, -1, slices, -1)
    else:
        row = torch.arange(n, device=codes.device).reshape(1, n, 1)
        above = _to_tiles(row, paired)[0, :, ::8, 0]  # [tiles, 2]: the first of 8 rows, which lie in one block
        column = torch.arange(0, wide, 64, device=codes.device).clamp(max=k - 1)
        factors = scale[:, above[:, None, :] // 128, column[None, :, None] // 128]  # [e, tiles, all steps, 2]
        factors = F.pad(factors.reshape(count, n // 16, slices, steps * 2), (0, -2 * steps % 4))
    return torch.cat((lanes, factors.contiguous().view(torch.uint8)), -1)


def fp8_lanes(codes: Tensor) -> Tensor:
    """E4M3 codes [N, C] with the bits of each four where decode_four of include/e4m3.cuh looks for them."""
    four = codes.unflatten(-1, (-1, 2, 2))  # [N, C / 4, pair, odd]
    first, second = four[:, :, 0], four[:, :, 1]
    low = (first & 15) << 4 | second & 15
    high = first & 0x80 | first >> 4 & 7 | second >> 4 & 8 | second & 0x70
    return torch.stack((low, high), -1).flatten(1)


def fp8_values(lanes: Tensor) -> Tensor:
    """The inverse of fp8_lanes."""
    low, high = lanes.unflatten(-1, (-1, 2, 2)).unbind(-1)  # [N, C / 4, odd]
    first = high & 0x80 | (high & 7) << 4 | low >> 4
    second = (high & 8) << 4 | high & 0x70 | low & 15
    return torch.stack((first, second), -2).flatten(1)


def scale_bytes(scale: Tensor) -> Tensor:
    """E4M3 values as 5 exponent bits, 22 above the value's own, and 3 mantissa bits; 0 for zero."""
    mantissa, exponent = torch.frexp(scale)
    held = (exponent + 21) * 8 + ((mantissa * 2 - 1) * 8).to(torch.int32)
    return torch.where(scale == 0, 0, held).to(torch.uint8)


def scale_values(held: Tensor) -> Tensor:
    """The inverse of scale_bytes, from int32 to float32."""
    return torch.where(held == 0, 0.0, torch.ldexp(1 + (held & 7) / 8, (held >> 3) - 22))


def _to_tiles(rows: Tensor, paired: bool) -> Tensor:
    """[e, N, C] to [e, N / 16, 16, C]."""
    count, n, c = rows.shape
    if not paired:
        return rows.reshape(count, n // 16, 16, c)
    return rows.reshape(count, 2, n // 16, 8, c).transpose(1, 2).reshape(count, n // 16, 16, c)


def _from_tiles(tiles: Tensor, paired: bool) -> Tensor:
    """The inverse of _to_tiles."""
    count, number, _, c = tiles.shape
    if not paired:
        return tiles.reshape(count, number * 16, c)
    return tiles.reshape(count, number, 2, 8, c).transpose(1, 2).reshape(count, number * 16, c)


def capacity_for(rows: int) -> int:
    """Most rows of the kernel that serves so many."""
    return next(capacity for capacity in CAPACITIES if capacity >= rows)


def capacities_up_to(rows: int) -> list[int]:
    """Kernels that serve 1 to so many rows."""
    return [c for c in CAPACITIES if c <= capacity_for(min(rows, MAX_ROWS))]


def list_bytes(experts: int, topk: int, rows: int, group: int) -> int:
    """Size of ExpertList in include/experts.cuh, rounded up to 16; group  most pairs of an entry."""
    pairs = rows * topk
    return -(-(4 * experts * -(-rows // 32) + 128 + 2 * experts + (6 + 2 * group) * pairs) // 16) * 16


def why_not_tiled(weight: PackedWeight, device: torch.device) -> str | None:
    """What keeps experts from the kernels, as the end of a sentence; None if nothing does."""
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if weight.format not in FORMATS or weight.data.ndim != 3 or weight.scale is None:
        return f"the kernel reads stacks of matrices in {', '.join(FORMATS)}"
    n, k = weight.shape
    if k % 16 or n % 16:
        return f"its [{n}, {k}] are not multiples of 16"
    if weight.format == "nvfp4" and not bool((weight.scale.float() >= 0).all()):
        return "a block scale is negative or not a number"
    if weight.format != "nvfp4" and any(bool((e.view(torch.uint8) & 127 == 127).any()) for e in weight.data.split(16)):
        return "an FP8 code is not a number"
    missing = missing_for_cuda()
    if missing is not None:
        return missing
    if torch.cuda.get_device_capability(device)[0] < 9:
        return "the kernel needs compute capability 9.0 (bulk copies)"
    return None


def contiguous_rows(x: Tensor) -> Tensor:
    """x [T, C] itself where its rows can be read 16 bytes at a time, else a copy."""
    return x.contiguous() if x.stride(-1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16 else x


def pack_pointers(tensors: tuple[Tensor | None, ...], strides: tuple[int, ...], rows: int) -> bytes:
    """A kernel's struct Arguments: pointers, strides in values, the number of rows."""
    addresses = (0 if t is None else t.data_ptr() for t in tensors)
    return struct.pack(f"{len(tensors)}P{len(strides)}qi4x", *addresses, *strides, rows)
