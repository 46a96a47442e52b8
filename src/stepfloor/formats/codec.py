"""Encode and decode the number formats of `formats.table` in torch.

Source: ModelOpt's NVFP4, MXFP8 and FP8 layouts and the OCP microscaling specification. Decoding is exact in
float32 except where a product of two scales needs more than 24 bits, which none of the formats here does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stepfloor.formats.table import FORMATS

E4M3_MAX = 448.0
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [N, K], or E of them, as stored: codes and scales of one format.

    format   name in formats.table.FORMATS
    shape    logical (N, K)
    data     [.., N, K], or [.., N, K/2] uint8 for nvfp4 (even element in the low nibble)
    scale    per format: fp8_block [.., ceil(N/128), ceil(K/128)], fp8_channel [.., N], fp8_tensor [1],
             mxfp8 [.., N, K/32] uint8, nvfp4 [.., N, K/16] E4M3; None for bf16 and fp32
    scale_2  nvfp4: float32 [] or [E]; else None
    A leading axis E is present when the weight is a stack of experts.
    """

    format: str
    shape: tuple[int, int]
    data: Tensor
    scale: Tensor | None = None
    scale_2: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(t.numel() * t.element_size() for t in (self.data, self.scale, self.scale_2) if t is not None)

    def expert(self, index: int) -> "PackedWeight":
        """One matrix of a stack, without copying."""
        return replace(
            self,
            data=self.data[index],
            scale=None if self.scale is None else self.scale[index],
            scale_2=None if self.scale_2 is None else self.scale_2[index],
        )

    def dequantize(self) -> Tensor:
        """The matrix in float32, [.., N, K]."""
        n, k = self.shape
        if self.scale is None:
            return self.data.float()
        if self.format == "fp8_block":
            scale = self.scale.float().repeat_interleave(128, -2)[..., :n, :]
            return self.data.float() * scale.repeat_interleave(128, -1)[..., :k]
        if self.format == "fp8_channel":
            return self.data.float() * self.scale.float()[..., None]
        if self.format == "fp8_tensor":
            return self.data.float() * self.scale.float()
        if self.format == "mxfp8":
            power = torch.exp2(self.scale.float() - 127.0)
            return (self.data.float().unflatten(-1, (-1, 32)) * power[..., None]).flatten(-2)
        if self.format == "nvfp4" and self.scale_2 is not None:
            values = unpack_fp4(self.data).unflatten(-1, (-1, 16))
            scale = self.scale.float() * self.scale_2.float()[..., None, None]
            return (values * scale[..., None]).flatten(-2)
        raise ValueError(f"no decoder for format {self.format!r}")

    def to(self, device: str | torch.device) -> "PackedWeight":
        """The same weight on another device."""
        return replace(
            self,
            data=self.data.to(device),
            scale=None if self.scale is None else self.scale.to(device),
            scale_2=None if self.scale_2 is None else self.scale_2.to(device),
        )


def unpack_fp4(packed: Tensor) -> Tensor:
    """uint8 [.., K/2] to float32 [.., K]: the low nibble is the even element."""
    table = torch.tensor(_FP4_VALUES + tuple(-v for v in _FP4_VALUES), device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return table[codes.long()]


def pack_fp4(values: Tensor) -> Tensor:
    """float [.., K] to uint8 [.., K/2]: nearest code, ties to the even code, clamped to 6."""
    magnitude = values.abs().clamp_(max=6.0)
    # codes lie 0.5 apart below 2, 1 apart below 4, 2 apart above: the least of the three roundings is the right one
    code = (magnitude * 2.0).round_()
    torch.minimum(code, magnitude.round().add_(2.0), out=code)
    torch.minimum(code, magnitude.mul_(0.5).round_().add_(4.0), out=code)
    codes = code.to(torch.uint8) | (values < 0).to(torch.uint8).mul_(8)
    # two codes of a byte each are one little-endian word, whose high byte belongs into the high nibble
    pairs = codes.contiguous().view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack_e4m3(codes: Tensor) -> Tensor:
    """E4M3 to float32, exactly; ten times as fast as torch's own cast on a CPU. NaN is not among the codes."""
    bits = codes.view(torch.uint8).to(torch.int16)
    # the seven bits under the sign are those of a float16 whose exponent counts from 2**-15 in place of 2**-7
    half = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
    return half.view(torch.float16).float().mul_(256.0)


def quantize(w: Tensor, format_name: str, tensor_scale: Tensor | None = None) -> PackedWeight:
    """Round a float matrix [N, K] (or a stack [E, N, K]) to a format, scales chosen from its own extrema.

    tensor_scale  the scale of the whole tensor where w is a part of it or shares it: amax / 448 for fp8_tensor,
                  amax / 2688 for nvfp4; other formats have none
    Raises ValueError if K is not a multiple of the format's group.
    """
    shape = (w.shape[-2], w.shape[-1])
    form = FORMATS[format_name]
    if form.group is not None and form.group[0] == 1 and shape[1] % form.group[1]:
        raise ValueError(f"{format_name} wants K a multiple of {form.group[1]}; got {shape[1]}")
    if format_name == "bf16":
        return PackedWeight(format_name, shape, w.to(torch.bfloat16))
    w = w.float()
    if format_name == "fp32":
        return PackedWeight(format_name, shape, w)
    if format_name == "fp8_channel":
        scale = _nonzero(w.abs().amax(-1) / E4M3_MAX)
        return PackedWeight(format_name, shape, _e4m3(w / scale[..., None]), scale)
    if format_name == "fp8_tensor":
        scale = _nonzero(w.abs().amax() / E4M3_MAX) if tensor_scale is None else tensor_scale
        scale = scale.to(torch.bfloat16).reshape(1)
        return PackedWeight(format_name, shape, _e4m3(w / scale.float()), scale)
    if format_name == "fp8_block":
        return _quantize_fp8_block(w, shape)
    if format_name == "mxfp8":
        blocks = w.unflatten(-1, (-1, 32))
        exponent = torch.ceil(torch.log2(_nonzero(blocks.abs().amax(-1)) / E4M3_MAX)).clamp(-127, 127)
        codes = _e4m3((blocks / torch.exp2(exponent)[..., None]).flatten(-2))
        return PackedWeight(format_name, shape, codes, (exponent + 127).to(torch.uint8))
    if format_name == "nvfp4":
        scale_2 = _nonzero(w.abs().amax((-2, -1)) / (6.0 * E4M3_MAX)) if tensor_scale is None else tensor_scale
        blocks = w.unflatten(-1, (-1, 16))
        scale = _e4m3(blocks.abs().amax(-1) / 6.0 / scale_2[..., None, None])
        step = _nonzero(scale.float() * scale_2[..., None, None])
        return PackedWeight(format_name, shape, pack_fp4((blocks / step[..., None]).flatten(-2)), scale, scale_2)
    raise ValueError(f"no encoder for format {format_name!r}; known: {', '.join(FORMATS)}")


def stack_rows(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Join matrices with the same K and format along N, so that one product serves an input they share.

    Raises ValueError where the format has a scale that cannot be joined (fp8_tensor, nvfp4 with different
    scale_2, fp8_block rows that are not multiples of 128).
    """
    first = weights[0]
    if any(w.format != first.format or w.shape[1] != first.shape[1] for w in weights):
        raise ValueError(f"stack_rows wants one format and one K; got {[(w.format, w.shape) for w in weights]}")
    if first.format == "fp8_tensor" or (first.format == "fp8_block" and any(w.shape[0] % 128 for w in weights[:-1])):
        raise ValueError(f"{first.format} matrices of {[w.shape[0] for w in weights]} rows cannot be stacked")
    globals_ = [w.scale_2 for w in weights if w.scale_2 is not None]
    if any(not torch.equal(g, globals_[0]) for g in globals_):
        raise ValueError("nvfp4 matrices with different weight_scale_2 cannot be stacked")
    axis = -2 if first.format != "fp8_channel" else -1
    scales = [w.scale for w in weights if w.scale is not None]
    return PackedWeight(
        first.format,
        (sum(w.shape[0] for w in weights), first.shape[1]),
        torch.cat([w.data for w in weights], -2),
        torch.cat(scales, axis) if scales else None,
        first.scale_2,
    )


def _quantize_fp8_block(w: Tensor, shape: tuple[int, int]) -> PackedWeight:
    n, k = shape
    padded = torch.nn.functional.pad(w, (0, -k % 128, 0, -n % 128))
    tiles = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))  # [.., n/128, 128, k/128, 128]
    scale = _nonzero(tiles.abs().amax((-3, -1)) / E4M3_MAX).to(torch.bfloat16)
    codes = _e4m3(tiles / scale.float()[..., :, None, :, None])
    return PackedWeight("fp8_block", shape, codes.flatten(-4, -3).flatten(-2)[..., :n, :k].contiguous(), scale)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _nonzero(scale: Tensor) -> Tensor:
    """An all-zero block still needs a scale to divide by."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))
