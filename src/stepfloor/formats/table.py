"""The number formats a checkpoint may store a matrix in: bits, groups, suffixes, dtypes. No torch.

Source: architecture of the `qwen4_exp` releases; ModelOpt's and the Qwen FP8 release's tensor layouts.
A stored matrix [N, K] is `weight` plus companions; dtype names are those of safetensors headers.
"""

from collections.abc import Callable
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Companion:
    """A tensor beside `weight`: its suffix, the dtypes it may have and its shape for a matrix [N, K]."""

    suffix: str
    dtypes: tuple[str, ...]
    shape: Callable[[int, int], Shape]
    alternative: Callable[[int, int], Shape] | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Format:
    """One storage format of a matrix [N, K].

    bits        bits of a code; group  values that share one block scale ((rows, columns)), None without blocks
    dtype       of `weight` in the file; pack  values per stored element of `weight` along K
    """

    name: str
    bits: int
    dtype: str
    pack: int = 1
    group: tuple[int, int] | None = None
    companions: tuple[Companion, ...] = ()

    def weight_shape(self, n: int, k: int) -> Shape:
        """Shape of `weight` in the file."""
        return (n, k // self.pack)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


_SCALAR: Callable[[int, int], Shape] = lambda n, k: ()  # noqa: E731
_ONE: Callable[[int, int], Shape] = lambda n, k: (1,)  # noqa: E731

BF16 = Format("bf16", 16, "BF16")
# fp32 is no release's format: test models and transformers' own exports use it.
FP32 = Format("fp32", 32, "F32")
FP8_BLOCK = Format(
    "fp8_block",
    8,
    "F8_E4M3",
    group=(128, 128),
    companions=(
        Companion(
            "weight_scale_inv",
            ("BF16", "F32"),
            lambda n, k: (_ceil_div(n, 128), _ceil_div(k, 128)),
            lambda n, k: (_ceil_div(n, 128), 1, _ceil_div(k, 128), 1),
        ),
    ),
)
FP8_CHANNEL = Format(
    "fp8_channel",
    8,
    "F8_E4M3",
    companions=(Companion("weight_scale", ("F32",), lambda n, k: (n,), lambda n, k: (n, 1)),),
)
FP8_TENSOR = Format("fp8_tensor", 8, "F8_E4M3", companions=(Companion("weight_scale", ("BF16", "F32"), _ONE, _SCALAR),))
MXFP8 = Format(
    "mxfp8", 8, "F8_E4M3", group=(1, 32), companions=(Companion("weight_scale", ("U8",), lambda n, k: (n, k // 32)),)
)
NVFP4 = Format(
    "nvfp4",
    4,
    "U8",
    pack=2,
    group=(1, 16),
    companions=(
        Companion("weight_scale", ("F8_E4M3",), lambda n, k: (n, k // 16)),
        Companion("weight_scale_2", ("F32",), _SCALAR, _ONE),
        # read by W4A4 kernels only; stepfloor never quantizes activations
        Companion("input_scale", ("F32",), _SCALAR, _ONE, optional=True),
    ),
)

FORMATS: dict[str, Format] = {f.name: f for f in (BF16, FP32, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP8, NVFP4)}

DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1, "BOOL": 1}


def stored_bytes(format_name: str, n: int, k: int) -> int:
    """Bytes a matrix [N, K] takes in the file, companions included (first dtype listed; input_scale not counted)."""
    f = FORMATS[format_name]
    total = 1
    for d in f.weight_shape(n, k):
        total *= d
    total *= DTYPE_BYTES[f.dtype]
    for companion in f.companions:
        if not companion.optional:
            count = 1
            for d in companion.shape(n, k):
                count *= d
            total += count * DTYPE_BYTES[companion.dtypes[0]]
    return total
