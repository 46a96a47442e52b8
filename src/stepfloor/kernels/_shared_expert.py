"""The shared expert's down matrix in the order that `moe_down.cu` and `moe_down_many.cu` read it.

`include/shared_expert.cuh` has the device's side. Source: moe_down.py, which has the operator and its reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._experts import fp8_lanes, fp8_values
from stepfloor.kernels._stream import MX_BIAS, mx_exponents, outer_scales, why_not_streamed

# SHARED_FORMAT of `moe_down.cu`; rows and columns that share a float32 scale, 0 for all columns
SHARED_FORMATS = {
    "bf16": (0, 1, 0),
    "fp8_channel": (1, 1, 0),
    "fp8_tensor": (1, 1, 0),
    "fp8_block": (1, 128, 128),
    "mxfp8": (2, 1, 0),
}


def shared_macros(format_name: str, k: int) -> tuple[int, int, int]:
    """SHARED_FORMAT, SCALE_ROWS and SCALE_COLUMNS for a shared expert's matrix of k columns."""
    number, rows, columns = SHARED_FORMATS[format_name]
    return number, rows, columns or max(1, k)


@dataclass(frozen=True, slots=True, eq=False)
class TiledShared:
    """The shared expert's matrix [N, K] as `moe_down.cu` reads it: [tile of 16 rows][64 columns][codes, then scales].

    tape   codes are 2 KB in bf16, 1 KB in FP8; MXFP8 has 32 bytes of powers behind them
    scale  float32 scales that multiply sums, as `_stream.outer_scales` gives them; None where the format has none
    """

    shape: tuple[int, int]
    tape: Tensor
    format: str = "bf16"
    scale: Tensor | None = None

    def unpack(self) -> PackedWeight:
        """The matrix as it was stored, copied; scales of 16-bit floats come back as float32."""
        n, k = self.shape
        if self.format == "bf16":
            cut = self.tape.reshape(n // 16, -1, 2, 2, 8, 4, 8).permute(0, 2, 4, 1, 3, 5, 6)
            return PackedWeight("bf16", self.shape, cut.reshape(n, -1)[:, :k].contiguous())
        cut = self.tape[..., :1024].reshape(n // 16, -1, 2, 8, 4, 2, 8).permute(0, 2, 3, 1, 5, 4, 6)
        data = fp8_values(cut.reshape(n, -1))[:, :k].contiguous().view(torch.float8_e4m3fn)
        scale = self.scale
        if self.format == "mxfp8":
            powers = self.tape[..., 1024:].reshape(n // 16, -1, 8, 2, 2).permute(0, 3, 2, 1, 4)
            scale = powers.reshape(n, -1)[:, : k // 32] - MX_BIAS
        elif self.format == "fp8_tensor" and scale is not None:
            scale = scale[:1]
        return PackedWeight(self.format, self.shape, data, scale)


def pack_shared(weight: PackedWeight) -> TiledShared:
    """Reorder the shared expert's matrix: a lane's 8 columns lie together, and so do a warp's 512 bytes."""
    n, k = weight.shape
    if weight.format == "bf16":
        padded = F.pad(weight.data, (0, -k % 64)).reshape(n // 16, 2, 8, -1, 2, 4, 8)  # tile, half, g, step, sub, t, 8
        return TiledShared(weight.shape, padded.permute(0, 3, 1, 4, 2, 5, 6).contiguous())
    lanes = fp8_lanes(F.pad(weight.data.view(torch.uint8), (0, -k % 64))).reshape(n // 16, 2, 8, -1, 2, 4, 8)
    tape = lanes.permute(0, 3, 1, 2, 5, 4, 6).reshape(n // 16, -1, 1024)
    if weight.format == "mxfp8":
        powers = F.pad((mx_exponents(weight) + MX_BIAS).to(torch.uint8), (0, -(k // 32) % 2))
        powers = powers.reshape(n // 16, 2, 8, -1, 2).permute(0, 3, 2, 1, 4)  # tile, step, g, half, sub
        tape = torch.cat((tape, powers.reshape(n // 16, -1, 32)), -1)
    return TiledShared(weight.shape, tape.contiguous(), weight.format, outer_scales(weight))


def why_not_fused(shared_down: Sequence[PackedWeight]) -> str | None:
    """What keeps the shared expert out of the kernel, as the end of a sentence; None if nothing does."""
    if len(shared_down) != 1:
        return f"the kernel takes one matrix, not {len(shared_down)}"
    if shared_down[0].format not in SHARED_FORMATS:
        return f"the kernel reads {', '.join(SHARED_FORMATS)}, not {shared_down[0].format}"
    if shared_down[0].shape[1] % 16:
        return f"its {shared_down[0].shape[1]} columns are not a multiple of 16"
    return why_not_streamed(shared_down[0])
