"""Number formats: literals from the specification, round trips, and scale layouts."""

import pytest
import torch

from stepfloor.formats.codec import PackedWeight, pack_fp4, quantize, stack_rows, unpack_fp4
from stepfloor.formats.table import FORMATS, stored_bytes

# Largest error of one value as a share of the largest magnitude that shares its scale. E4M3 has 3 mantissa bits
# and rounds to nearest: 2**-4 of the value. fp4 spans 0..6 with a widest gap of 2, so 1/6 of the block's largest,
# and its block scale is an E4M3 number, 2**-4 off. MXFP8 rounds its scale up to a power of two: E4M3's 2**-4.
BOUNDS = {
    "bf16": 2**-8,
    "fp32": 0.0,
    "fp8_block": 2**-4,
    "fp8_channel": 2**-4,
    "fp8_tensor": 2**-4 + 2**-8,  # its scale is stored in bf16
    "mxfp8": 2**-4,
    "nvfp4": 1 / 6 + 2**-4,
}


def matrix(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def test_low_nibble_comes_first() -> None:
    packed = torch.tensor([[0x2B, 0x71, 0xF0, 0x9E]], dtype=torch.uint8)
    codes = [-1.5, 1.0, 0.5, 6.0, 0.0, -6.0, -4.0, -0.5]
    assert unpack_fp4(packed).tolist() == [codes]
    # scale byte 0x40 is 2.0 in E4M3; the block is padded to the 16 values that share it
    data = torch.cat((packed, torch.zeros(1, 4, dtype=torch.uint8)), 1)
    scale = torch.tensor([[0x40]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = PackedWeight("nvfp4", (1, 16), data, scale, torch.tensor(0.25))
    assert weight.dequantize()[0, :8].tolist() == [c * 0.5 for c in codes]


@pytest.mark.parametrize(
    ("value", "wanted"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (7, 6)]
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_fp4_ties_go_to_the_even_code(value: float, wanted: float, sign: float) -> None:
    assert unpack_fp4(pack_fp4(torch.tensor([[sign * value, 0.0]])))[0, 0].item() == sign * wanted


def test_every_fp4_code_survives_a_round_trip() -> None:
    every = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    again = pack_fp4(unpack_fp4(every))
    # minus zero is the one code that encoding does not produce
    assert torch.equal(unpack_fp4(again), unpack_fp4(every))


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("shape", [(3, 32), (128, 128), (130, 160)])
def test_round_trip_error_stays_below_the_formats_own(name: str, shape: tuple[int, int]) -> None:
    w = matrix(*shape)
    error = (quantize(w, name).dequantize() - w).abs().max()
    assert error <= BOUNDS[name] * w.abs().max()


@pytest.mark.parametrize("name", list(FORMATS))
def test_second_round_trip_changes_nothing(name: str) -> None:
    once = quantize(matrix(128, 128), name).dequantize()
    twice = quantize(once, name).dequantize()
    # a scale that is chosen again from rounded values may move by its own rounding and no more
    assert (twice - once).abs().max() <= BOUNDS[name] * once.abs().max()


@pytest.mark.parametrize(
    ("name", "scale", "second"),
    [
        ("fp8_block", (2, 2), None),
        ("fp8_channel", (130,), None),
        ("fp8_tensor", (1,), None),
        ("mxfp8", (130, 5), None),
        ("nvfp4", (130, 10), ()),
    ],
)
def test_scale_layout_is_the_files(name: str, scale: tuple[int, ...], second: tuple[int, ...] | None) -> None:
    packed = quantize(matrix(130, 160), name)
    form = FORMATS[name]
    assert tuple(packed.data.shape) == form.weight_shape(130, 160)
    assert packed.scale is not None
    assert tuple(packed.scale.shape) == scale == form.companions[0].shape(130, 160)
    assert (None if packed.scale_2 is None else tuple(packed.scale_2.shape)) == second
    assert packed.num_bytes == stored_bytes(name, 130, 160)


def test_block_scales_are_those_of_their_own_block() -> None:
    w = torch.ones(256, 256)
    w[128:, :128] = 4.0
    w[:128, 128:] = 0.25
    scale = quantize(w, "fp8_block").scale
    assert scale is not None
    assert torch.allclose(scale.float() * 448, torch.tensor([[1.0, 0.25], [4.0, 1.0]]), rtol=2**-8)


def test_nvfp4_scales_follow_sixteen_values_along_k() -> None:
    w = torch.zeros(1, 32)
    w[0, :16], w[0, 16:] = 6.0, 0.75
    packed = quantize(w, "nvfp4")
    assert packed.scale is not None
    assert packed.scale_2 is not None
    steps = packed.scale.float() * packed.scale_2
    assert torch.allclose(steps, torch.tensor([[1.0, 0.125]]), rtol=2**-4)


def test_mxfp8_scale_is_a_power_of_two_that_holds_the_largest_value() -> None:
    w = torch.full((1, 32), 500.0)
    packed = quantize(w, "mxfp8")
    assert packed.scale is not None
    assert packed.scale.item() == 127 + 1
    assert packed.dequantize()[0, 0].item() == 512.0  # 500 / 2 rounds to 256 among E4M3's steps of 16 there


def test_zero_matrix_stays_zero_in_every_format() -> None:
    for name in FORMATS:
        packed = quantize(torch.zeros(16, 32), name)
        assert torch.equal(packed.dequantize().float(), torch.zeros(16, 32)), name


@pytest.mark.parametrize("name", ["fp8_tensor", "nvfp4"])
def test_parts_of_a_matrix_share_the_whole_ones_scale(name: str) -> None:
    w = matrix(64, 32)
    levels = 448.0 if name == "fp8_tensor" else 2688.0
    whole = quantize(w, name)
    parts = [quantize(half, name, w.abs().max() / levels) for half in w.split(32)]
    assert torch.equal(torch.cat([p.data.view(torch.uint8) for p in parts]), whole.data.view(torch.uint8))
    assert torch.equal(stack_rows(parts).dequantize() if name == "nvfp4" else whole.dequantize(), whole.dequantize())


@pytest.mark.parametrize(("name", "k"), [("nvfp4", 24), ("mxfp8", 48)])
def test_rows_that_no_group_divides_are_refused(name: str, k: int) -> None:
    with pytest.raises(ValueError, match="wants K a multiple of"):
        quantize(matrix(4, k), name)


def test_stacking_refuses_what_one_scale_cannot_serve() -> None:
    a, b = quantize(matrix(64, 32), "nvfp4"), quantize(matrix(64, 32, 1), "nvfp4")
    with pytest.raises(ValueError, match="different weight_scale_2"):
        stack_rows((a, b))
    with pytest.raises(ValueError, match="cannot be stacked"):
        stack_rows((quantize(matrix(64, 128), "fp8_block"), quantize(matrix(64, 128), "fp8_block")))


def test_stack_of_experts_is_each_expert() -> None:
    w = torch.stack([matrix(16, 32, seed) for seed in range(3)])
    for name in FORMATS:
        if name == "fp8_tensor":  # one scale for the stack
            continue
        stacked = quantize(w, name)
        for e in range(3):
            assert torch.equal(stacked.dequantize()[e], quantize(w[e], name).dequantize()), name
