"""Gate and up projections of the chosen experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._experts import pack_experts
from stepfloor.kernels._grouped import WIDE, Tiles
from stepfloor.kernels.moe_gate_up import (
    DECODE,
    PREFILL,
    WARPS,
    gate_up_grouped,
    moe_gate_up,
    moe_gate_up_inputs,
    moe_gate_up_reference,
)
from tests.kernels.compare import (
    MATRIX_FORMATS,
    UNIT,
    assert_rounded_alike,
    assert_rows_alone,
    assert_same,
    assert_within,
    decoded,
    twin,
    with_weights,
)
from tests.kernels.compiled import Case, assert_compiles
from tests.kernels.grouped import crowded, moved, poison_new_tensors
from tests.kernels.source import Recording, as_stored

DTYPES = [torch.float32, torch.bfloat16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def one_by_one(x: Tensor, ids: Tensor, matrices: Tensor) -> Tensor:
    """The source's expert loop, a pair at a time."""
    rows = []
    for t, chosen in enumerate(ids.tolist()):
        projected = [linear(x[t : t + 1], matrices[e]).chunk(2, -1) for e in chosen]
        rows.append(torch.cat([silu(gate) * up for gate, up in projected]))
    return torch.stack(rows)


def bound(x: Tensor, ids: Tensor, matrices: Tensor, weight_error: float, dtype: torch.dtype) -> Tensor:
    """How far two evaluations of silu(g) u may lie apart.

    Two orders of K float32 products, weights off by weight_error of themselves, and in bf16 a step (two roundings)
    in each of gate, up, silu and the result. silu's slope is at most 1.1 and |silu(g)| at most |g|.
    """
    chosen = matrices.double()[ids]  # [T, topk, 2 I, D]
    values = torch.einsum("td,tjnd->tjn", x.double(), chosen).abs()
    total = torch.einsum("td,tjnd->tjn", x.double().abs(), chosen.abs())
    step = 2 * UNIT[torch.bfloat16] * (dtype == torch.bfloat16)
    moved = (weight_error + 2 * x.shape[1] * 2.0**-24) * total + step * values
    (gate, up), (moved_gate, moved_up) = values.chunk(2, -1), moved.chunk(2, -1)
    return 1.1 * moved_gate * (up + moved_up) + gate * moved_up + (2 * step + 8 * 2.0**-24) * (gate * up) * 1.02


def test_hidden_rows_are_the_sources(recording: Recording) -> None:
    experts = recording.module("layers.3.mlp.experts")
    matrices = experts.gate_up_proj.detach()
    x, ids = recording.into("layers.3.mlp"), recording.out("layers.3.mlp.gate", 2)
    ours = moe_gate_up(x, ids, as_stored(matrices))
    wanted = one_by_one(x, ids, matrices)
    assert_within(ours, wanted, bound(x, ids, matrices, 0.0, recording.dtype))
    assert_rounded_alike(ours, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("t", "experts", "topk"), [(1, 5, 5), (21, 3, 1), (21, 2, 2), (33, 64, 3), (4, 6, 3)])
def test_tiles_of_any_fill_are_pair_by_pair(t: int, experts: int, topk: int, dtype: torch.dtype) -> None:
    """One row; more than eight rows on one expert; every expert the same rows; experts nobody chose."""
    inputs = moe_gate_up_inputs(t, 19, 11, experts, topk, "fp32", dtype, "cpu")
    ours = moe_gate_up(**inputs)
    x, ids, matrices = inputs["x"], inputs["ids"], inputs["gate_up"].data
    wanted = one_by_one(x.float(), ids, matrices)
    # the yardstick stays in float32: gate, up, silu and result each rounded once in bf16, no more than a step
    assert_within(ours.float(), wanted, bound(x, ids, matrices, 0.0, dtype) + 2.0**-24)


def test_all_rows_on_one_expert() -> None:
    inputs = moe_gate_up_inputs(21, 16, 8, 4, 1, "fp32", torch.float32, "cpu")
    inputs["ids"] = torch.full((21, 1), 2)
    alone = {**inputs, "gate_up": inputs["gate_up"].expert(2)}
    alone["gate_up"] = PackedWeight("fp32", alone["gate_up"].shape, alone["gate_up"].data[None])
    assert_same(moe_gate_up(**inputs), moe_gate_up(**{**alone, "ids": torch.zeros(21, 1).long()}))


def test_an_experts_place_among_the_choices_is_free() -> None:
    inputs = moe_gate_up_inputs(13, 19, 11, 7, 4, "fp32", torch.bfloat16, "cpu")
    turned = moe_gate_up(**{**inputs, "ids": inputs["ids"].flip(-1)})
    assert_same(turned.flip(1), moe_gate_up(**inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MATRIX_FORMATS)
def test_every_format_is_its_decoded_matrix(name: str, dtype: torch.dtype) -> None:
    """Each expert's own scales: a stack's first scale for all is the failure."""
    inputs = moe_gate_up_inputs(9, 160, 70, 5, 2, name, dtype, "cpu")
    ours = moe_gate_up(**inputs)
    assert_same(ours, moe_gate_up(**with_weights(inputs, decoded)))
    near = moe_gate_up(**with_weights(inputs, twin))
    assert_within(near, ours, bound(inputs["x"], inputs["ids"], inputs["gate_up"].dequantize(), 2.0**-8, dtype) * 1.01)


def test_scales_stay_with_their_expert() -> None:
    inputs = moe_gate_up_inputs(3, 32, 8, 4, 2, "nvfp4", torch.float32, "cpu")
    packed = inputs["gate_up"]
    assert packed.scale_2.shape == (4,)
    for e in range(4):
        assert_same(packed.expert(e).dequantize(), packed.dequantize()[e])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "width"), [(19, 11), (64, 24), (515, 33)])
def test_rows_do_not_disturb_each_other(d: int, width: int, dtype: torch.dtype) -> None:
    """A row shares its tile with whatever rows chose the same expert."""
    inputs = moe_gate_up_inputs(21, d, width, 5, 3, "fp32", dtype, "cpu")
    assert_rows_alone(moe_gate_up, inputs, ("x", "ids"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(1, 2).long()}, r"\(3, 19\), \(1, 2\), \(22, 19\)"),
        ({"x": torch.zeros(3, 18)}, r"\(3, 18\), \(3, 2\), \(22, 19\)"),
    ],
)
def test_disagreeing_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_gate_up(**{**moe_gate_up_inputs(3, 19, 11, 4, 2, "fp32", torch.float32, "cpu"), **change})


def grouped(inputs: dict[str, Any], **how: Any) -> Tensor:
    """The Triton kernel on rows that NaN surrounds."""
    placed = moved(inputs, DEVICE)
    x = placed["x"]
    held = torch.full((x.shape[0] + 1, x.shape[1] + 8), torch.nan, dtype=x.dtype, device=DEVICE)
    held[:-1, :-8] = x
    return gate_up_grouped(held[:-1, :-8], placed["ids"], placed["gate_up"], **how).cpu()


@pytest.mark.parametrize(
    ("dtype", "ordered"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)], ids=str
)
@pytest.mark.parametrize("name", MATRIX_FORMATS)
def test_kernel_is_the_reference(name: str, dtype: torch.dtype, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that fill no tile, two tiles of rows on one expert, experts nobody chose."""
    inputs = moe_gate_up_inputs(19, 160, 70, 6, 2, name, dtype, "cpu")
    inputs["ids"] = crowded(19, 6, 2)
    poison_new_tensors(monkeypatch)
    ours, wanted = grouped(inputs, ordered=ordered), moe_gate_up_reference(**inputs)
    assert_within(ours, wanted, bound(inputs["x"], inputs["ids"], inputs["gate_up"].dequantize(), 2.0**-22, dtype))
    assert_rounded_alike(ours, wanted)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("d", "width", "experts", "topk"), [(256, 48, 8, 2), (52, 22, 11, 3)])
def test_kernel_at_sizes_of_small_models(d: int, width: int, experts: int, topk: int, ordered: bool) -> None:
    inputs = moe_gate_up_inputs(5, d, width, experts, topk, "bf16", torch.bfloat16, "cpu")
    ours, wanted = grouped(inputs, ordered=ordered), moe_gate_up_reference(**inputs)
    assert_within(ours, wanted, bound(inputs["x"], inputs["ids"], inputs["gate_up"].dequantize(), 0.0, torch.bfloat16))
    assert_rounded_alike(ours, wanted)


@pytest.mark.parametrize("ordered", [False, True])
def test_rows_of_the_kernel_do_not_disturb_each_other(ordered: bool) -> None:
    """A row's place in its tile, and the rows there, depend on all that were chosen."""
    inputs = moe_gate_up_inputs(19, 52, 22, 6, 2, "bf16", torch.bfloat16, "cpu")
    inputs["ids"] = crowded(19, 6, 2)
    together = grouped(inputs, ordered=ordered)
    for some in ([18], [3, 1, 17], list(range(18, 1, -1))):
        part = {**inputs, "x": inputs["x"][some], "ids": inputs["ids"][some]}
        assert_same(grouped(part, ordered=ordered), together[some])


@pytest.mark.parametrize("ordered", [False, True])
def test_ids_of_padding_rows_may_be_anything(ordered: bool) -> None:
    """Rows of a padded step are not finite, and what they chose must not be looked up outside."""
    inputs = moe_gate_up_inputs(4, 32, 16, 5, 2, "bf16", torch.bfloat16, "cpu")
    wild = inputs["ids"].clone()
    wild[2] = torch.tensor([-(2**40), 2**40 + 7])
    kept = [0, 1, 3]
    ours = grouped({**inputs, "ids": wild}, ordered=ordered)
    assert_same(ours[kept], grouped(inputs, ordered=ordered)[kept])


def test_tiled_experts_are_decoded_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices that do not divide the experts; the last has one."""
    monkeypatch.setattr("stepfloor.kernels._grouped.EXPERTS_AT_ONCE", 2)
    inputs = moved(moe_gate_up_inputs(9, 64, 16, 5, 3, "nvfp4", torch.bfloat16, "cpu"), DEVICE)
    tiled = pack_experts(inputs["gate_up"], WARPS, True, tmp_path)
    whole = gate_up_grouped(**inputs, ordered=True)
    assert_rounded_alike(gate_up_grouped(**{**inputs, "gate_up": tiled}), whole)


def compile_case(cut: Tiles, n: int, k: int, codes: str, scaling: str, **changes: Any) -> Case:
    """The kernel for matrices [n, k], as the model's sizes specialise it."""
    wide, ordered, arch = (
        changes.get(key, default) for key, default in (("wide", 0), ("ordered", False), ("arch", 90))
    )
    value = "*fp32" if wide else "*bf16"
    orders = ("order_ptr", "pair_starts_ptr", "tile_starts_ptr", "tile_experts_ptr")
    pointers = {"x_ptr": value, "out_ptr": value, "ids_ptr": "*i64", **dict.fromkeys(orders, "*i32")}
    pointers |= {"data_ptr": value if codes == "plain" else "*u8", "scale_ptr": "*u8", "factor_ptr": "*fp32"}
    absent = () if ordered else orders
    absent += () if codes in ("mxfp8", "nvfp4") else ("scale_ptr",)
    absent += () if scaling != "none" else ("factor_ptr",)
    cut = cut.fit(n // 2, k)
    constants: dict[str, Any] = dict.fromkeys(absent)
    constants |= {"EXPERTS": 512, "HELD": 512, "TOPK": 10, "ORDERED": ordered, "N": n, "K": k, "CODES": codes}
    constants |= {"SCALING": scaling, "WIDE": wide, "NATIVE": arch >= 89, "BLOCK_M": cut.rows}
    constants |= {"BLOCK_N": cut.columns, "BLOCK_K": cut.depth, "CHUNK": 64, "PDL": arch >= 90}
    signature = {**pointers, "x_stride": "i32", "pairs": "i32", "first": "i32"}
    aligned = (*pointers, *(("x_stride",) if k % 16 == 0 else ()))
    where = "stepfloor.kernels.moe_gate_up", "_gate_up_kernel"
    return Case(*where, signature, constants, cut.warps, arch, cut.stages, aligned)


def test_kernel_compiles() -> None:
    """The formats at the release's sizes, a small model in float32, and a GPU without FP8."""
    assert_compiles(
        [
            compile_case(DECODE, 1280, 2560, "plain", "none"),
            compile_case(DECODE, 1280, 2560, "fp8", "row"),
            compile_case(DECODE, 1280, 2560, "nvfp4", "expert"),
            compile_case(PREFILL, 1280, 2560, "plain", "expert", ordered=True),
            compile_case(PREFILL, 1280, 2560, "fp8", "block", ordered=True),
            compile_case(WIDE, 44, 52, "plain", "none", wide=True),
            compile_case(DECODE, 1280, 2560, "mxfp8", "none", arch=80),
        ]
    )
