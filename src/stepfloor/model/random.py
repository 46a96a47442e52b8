"""Random weights drawn on the device in the layout of a release: a model to measure without a download.

Sizes are such that activations stay finite: matrices have variance 1 / K, norms and the vectors of the delta net are
what a trained model has. One seed gives one model on one device.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stepfloor.config import ModelConfig
from stepfloor.model.tensors import DTYPES
from stepfloor.weights.checkpoint import Weight
from stepfloor.weights.expected import Shape, hash_buffers

CODE_SIGMA = 64.0  # standard deviation of random E4M3 codes; the largest, 448, is seven of them
# all 16 FP4 codes are as likely, and block scales lie between 0.75 and 1.375: the product has this deviation
FP4_SIGMA = 2.926 * 1.075
_SCALE_CODES = (0x34, 0x3C)
_PIECE = 1 << 26  # values drawn at once, so that float32 draws of a large tensor do not need four times its memory


class RandomTensors:
    """Draws what a file would hold."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self._seed = seed
        self._buffers = hash_buffers(config)
        self._table_sigma = config.ple_embed_dim**-0.5

    def parts(self, weight: Weight) -> dict[str, Tensor]:
        """See TensorSource."""
        return {suffix: stack[0] for suffix, stack in self.stacked((weight,)).items()}

    def stacked(self, weights: Sequence[Weight]) -> dict[str, Tensor]:
        """See TensorSource; a stack is drawn in one go, so its matrices are not those of single draws."""
        first = weights[0]
        if first.name in self._buffers:
            return {"weight": torch.tensor([self._buffers[first.name]], dtype=torch.int64, device=self.device)}
        digest = hashlib.blake2b(f"{self._seed}:{first.name}".encode(), digest_size=7).digest()
        make = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little"))
        sigma = self._table_sigma if ".ngram_embedding" in first.name else first.shape[-1] ** -0.5
        if first.name == "embed_tokens":
            # several times what the layers add: else all rows of a step look alike and choose the same experts
            sigma = 8.0
        drawn: dict[str, Tensor] = {}
        for suffix, entry in first.parts.items():
            out = torch.empty((len(weights), *entry.shape), dtype=DTYPES[entry.dtype], device=self.device)
            if suffix != "weight":
                _fill_scale(out, first.format, sigma, make)
            elif len(first.shape) > 1 and not first.name.endswith("conv1d"):
                _fill_codes(out, first.format, sigma, make)
            else:
                out[0] = special_values(first.name, entry.shape, make).to(out.dtype)
            drawn[suffix] = out
        return drawn


def special_values(name: str, shape: Shape, generator: torch.Generator) -> Tensor:
    """Vectors and convolutions, at the size a trained model has them, so that activations stay finite."""
    device = generator.device
    if name.endswith("A_log"):
        return torch.rand(shape, generator=generator, device=device).mul(15.0).add(1.0).log()
    if name.endswith("dt_bias"):
        # softplus(dt_bias) is log-uniform in 0.001 to 0.1
        uniform = torch.rand(shape, generator=generator, device=device)
        dt = (uniform * math.log(100.0) + math.log(0.001)).exp()
        return dt + (-torch.expm1(-dt)).log()
    values = torch.randn(shape, generator=generator, device=device)
    if name.endswith("conv1d"):
        return values * shape[-1] ** -0.5
    # every norm multiplies by 1 + w but the gated one of the delta net
    return values * 0.02 + (1.0 if name.endswith("linear_attn.norm") else 0.0)


def _fill_codes(out: Tensor, format_name: str, sigma: float, make: torch.Generator) -> None:
    flat = out.view(-1)
    for at in range(0, flat.numel(), _PIECE):
        piece = flat[at : at + _PIECE]
        if out.dtype == torch.uint8:  # two FP4 codes
            piece.random_(0, 256, generator=make)
            continue
        values = torch.randn(piece.shape, generator=make, device=out.device)
        if out.dtype == torch.float8_e4m3fn:
            # a scale of MXFP8 is a power of two; the codes make up for the rest
            values.mul_(sigma / _mx_scale(sigma) if format_name == "mxfp8" else CODE_SIGMA).clamp_(-448, 448)
        else:
            values.mul_(sigma)
        piece.copy_(values)


def _fill_scale(out: Tensor, format_name: str, sigma: float, make: torch.Generator) -> None:
    if format_name == "mxfp8":
        out.fill_(127 + round(math.log2(_mx_scale(sigma))))
    elif out.dtype == torch.float8_e4m3fn:
        out.view(torch.uint8).random_(*_SCALE_CODES, generator=make)
    else:
        out.fill_(sigma / (FP4_SIGMA if format_name == "nvfp4" else CODE_SIGMA))


def _mx_scale(sigma: float) -> float:
    return 2.0 ** round(math.log2(sigma / CODE_SIGMA))
