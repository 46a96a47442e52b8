"""Down projections, weighted sum and shared expert."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import quantize
from stepfloor.kernels._down_many import SLICES
from stepfloor.kernels._experts import pack_experts
from stepfloor.kernels._grouped import WIDE, Tiles
from stepfloor.kernels._grouped_down import DECODE, PREFILL, down_grouped
from stepfloor.kernels.moe_down import moe_down, moe_down_inputs, moe_down_reference
from stepfloor.kernels.moe_gate_up import moe_gate_up
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
PER_ROW = ("hidden", "ids", "weights", "shared_hidden", "shared_gate")


def exact(inputs: dict[str, Any], magnitudes: bool = False) -> Tensor:
    """The equation in float64, or the sum of the magnitudes of all its products."""
    size = torch.abs if magnitudes else (lambda t: t)
    chosen = size(inputs["down"].dequantize().double())[inputs["ids"]]  # [T, topk, D, I]
    out = torch.einsum("tji,tjdi->tjd", size(inputs["hidden"].double()), chosen)
    shared = torch.cat([size(w.dequantize().double()) for w in inputs["shared_down"]])
    routed = (size(inputs["weights"].double())[..., None] * out).sum(1)
    return routed + size(inputs["shared_gate"].double()) * (size(inputs["shared_hidden"].double()) @ shared.T)


def roundings_bound(inputs: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """How far a result lies from the exact one: K + topk float32 terms, five roundings to the model's dtype.

    Down product, its weighted value, the sum, the shared product with its gate, the total: none is larger than the
    sum of magnitudes. (Product and gate of the shared expert round twice, but not what the routed experts add.)
    """
    terms = max(inputs["hidden"].shape[2], inputs["shared_hidden"].shape[1]) + inputs["ids"].shape[1]
    return (terms * 2.0**-24 + 5 * UNIT[dtype]) * 1.02 * exact(inputs, magnitudes=True)


@pytest.mark.parametrize("layer", [0, 3])
def test_block_is_the_sources(recording: Recording, layer: int) -> None:
    """The source's own routing, hidden rows from our first half; its output is the whole block's."""
    prefix = f"layers.{layer}.mlp"
    experts = recording.module(f"{prefix}.experts")
    ids = recording.out(f"{prefix}.gate", 2)
    inputs = {
        "hidden": moe_gate_up(recording.into(prefix), ids, as_stored(experts.gate_up_proj)),
        "ids": ids,
        "weights": recording.out(f"{prefix}.gate", 1),
        "down": as_stored(experts.down_proj),
        "shared_hidden": recording.into(f"{prefix}.shared_expert.down_proj"),
        "shared_gate": torch.sigmoid(recording.out(f"{prefix}.shared_expert_gate")),
        "shared_down": (recording.weight(f"{prefix}.shared_expert.down_proj"),),
    }
    ours, wanted = moe_down(**inputs), recording.out(prefix)
    # ours and the source's each off as derived; the source rounds once more an expert, adding into its own dtype, and
    # its hidden rows may be a step from ours (two orders of D float32 products before a rounding)
    adds = ids.shape[1] * UNIT[recording.dtype] + 2 * recording.config.hidden_size * 4 * 2.0**-24
    flips = 2 * UNIT[recording.dtype] if recording.dtype == torch.bfloat16 else 0.0
    bound = 2 * roundings_bound(inputs, recording.dtype) + (adds + flips) * exact(inputs, magnitudes=True)
    assert_within(ours, wanted, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("t", "experts", "topk"), [(1, 5, 5), (21, 3, 1), (21, 2, 2), (33, 64, 3), (4, 6, 3)])
def test_tiles_of_any_fill_are_the_equation(t: int, experts: int, topk: int, dtype: torch.dtype) -> None:
    """One row; more than eight rows on one expert; every expert the same rows; experts nobody chose."""
    inputs = moe_down_inputs(t, 19, 11, 13, experts, topk, "fp32", dtype, "cpu")
    assert_within(moe_down(**inputs).double(), exact(inputs), roundings_bound(inputs, dtype))


def test_roundings_are_the_sources_but_for_the_sum() -> None:
    """Each weighted product is rounded as in the source; the sum runs in float32 and is rounded once."""
    inputs = moe_down_inputs(9, 16, 8, 8, 6, 4, "bf16", torch.bfloat16, "cpu")
    matrices = inputs["down"].data[inputs["ids"]].float()  # [T, topk, D, I]
    out = torch.einsum("tji,tjdi->tjd", inputs["hidden"].float(), matrices).to(torch.bfloat16)
    routed = (out * inputs["weights"][..., None]).float().sum(1).to(torch.bfloat16)
    shared = (inputs["shared_hidden"].float() @ inputs["shared_down"][0].data.float().T).to(torch.bfloat16)
    assert_rounded_alike(moe_down(**inputs), routed + inputs["shared_gate"] * shared)


def test_sum_of_the_choices_is_float32() -> None:
    """In a bf16 sum 256 swallows each of the ones that follow."""
    topk = 9
    weights = torch.ones(1, topk, dtype=torch.bfloat16)
    hidden = torch.ones(1, topk, 1, dtype=torch.bfloat16)
    hidden[0, 0] = 256
    one = (quantize(torch.zeros(1, 1), "bf16"),)
    zero = torch.zeros(1, 1, dtype=torch.bfloat16)
    down = quantize(torch.ones(topk, 1, 1), "bf16")
    ids = torch.arange(topk)[None]
    assert moe_down(hidden, ids, weights, down, zero, zero, one).item() == 264


def test_sum_runs_in_order_of_the_choices() -> None:
    """By falling weight, as routed: 2**24 + 1 - 2**24 is 0 in that order, and 1 in ascending expert id."""
    hidden = torch.tensor([[[2.0**24], [1.0], [-(2.0**24)]]])
    ids, weights = torch.tensor([[2, 1, 3]]), torch.ones(1, 3)
    nothing = torch.zeros(1, 1)
    down, shared = quantize(torch.ones(4, 1, 1), "fp32"), (quantize(torch.zeros(1, 1), "fp32"),)
    assert moe_down(hidden, ids, weights, down, nothing, nothing, shared).item() == 0.0
    assert moe_down(hidden[:, [0, 2, 1]], ids[:, [0, 2, 1]], weights, down, nothing, nothing, shared).item() == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MATRIX_FORMATS)
def test_every_format_is_its_decoded_matrix(name: str, dtype: torch.dtype) -> None:
    inputs = moe_down_inputs(9, 130, 160, 96, 5, 2, name, dtype, "cpu")
    inputs["shared_down"] = (quantize(inputs["shared_down"][0].dequantize(), name),)
    ours = moe_down(**inputs)
    assert_same(ours, moe_down(**with_weights(inputs, decoded)))
    near = moe_down(**with_weights(inputs, twin))
    # the twin's weights are off by 2**-8, and each side as derived from the exact result
    assert_within(near, ours, 2.0**-8 * exact(inputs, magnitudes=True) + 2.02 * roundings_bound(inputs, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "width", "shared"), [(19, 11, 13), (64, 24, 24), (33, 515, 7)])
def test_rows_do_not_disturb_each_other(d: int, width: int, shared: int, dtype: torch.dtype) -> None:
    inputs = moe_down_inputs(21, d, width, shared, 5, 3, "fp32", dtype, "cpu")
    assert_rows_alone(moe_down, inputs, PER_ROW)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(1, 2).long()}, r"\(3, 2, 11\), \(1, 2\)"),
        ({"weights": torch.zeros(3, 1)}, r"\(3, 2\), \(3, 1\)"),
        ({"hidden": torch.zeros(3, 2, 10)}, r"\(3, 2, 10\).*\(19, 11\)"),
        ({"shared_gate": torch.zeros(1, 1)}, r"\[3, 1\].*\(3, 13\), \(1, 1\)"),  # would broadcast over all rows
        ({"shared_hidden": torch.zeros(1, 13)}, r"\[3, Is\].*\(1, 13\)"),
        ({"shared_down": (quantize(torch.zeros(1, 13), "fp32"),)}, r"\[19, Is\].*\[\(1, 13\)\]"),
    ],
)
def test_disagreeing_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_down(**{**moe_down_inputs(3, 19, 11, 13, 4, 2, "fp32", torch.float32, "cpu"), **change})


def grouped(inputs: dict[str, Any], **how: Any) -> Tensor:
    """The Triton kernels, the shared expert's rows apart from each other."""
    placed = moved(inputs, DEVICE)
    rows = placed["shared_hidden"]
    held = torch.full((rows.shape[0] + 1, rows.shape[1] + 8), torch.nan, dtype=rows.dtype, device=DEVICE)
    held[:-1, :-8] = rows
    return down_grouped(**{**placed, "shared_hidden": held[:-1, :-8]}, **how).cpu()


@pytest.mark.parametrize(
    ("dtype", "ordered"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)], ids=str
)
@pytest.mark.parametrize("name", MATRIX_FORMATS)
def test_kernel_is_the_reference(name: str, dtype: torch.dtype, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that fill no tile, two tiles of rows on one expert and of the shared one, experts nobody chose."""
    inputs = moe_down_inputs(19, 70, 160, 96, 6, 2, name, dtype, "cpu")
    inputs["ids"] = crowded(19, 6, 2)
    inputs["shared_down"] = (quantize(inputs["shared_down"][0].dequantize(), name),)
    poison_new_tensors(monkeypatch)
    ours, wanted = grouped(inputs, ordered=ordered), moe_down_reference(**inputs)
    assert_within(ours, wanted, 2 * roundings_bound(inputs, dtype))
    assert_rounded_alike(ours, wanted)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("d", "width", "shared", "experts", "topk"), [(256, 48, 64, 8, 2), (52, 22, 18, 11, 3), (64, 32, 7, 4, 4)]
)
def test_kernel_at_sizes_of_small_models(
    d: int, width: int, shared: int, experts: int, topk: int, ordered: bool
) -> None:
    inputs = moe_down_inputs(5, d, width, shared, experts, topk, "bf16", torch.bfloat16, "cpu")
    ours, wanted = grouped(inputs, ordered=ordered), moe_down_reference(**inputs)
    assert_within(ours, wanted, 2 * roundings_bound(inputs, torch.bfloat16))
    assert_rounded_alike(ours, wanted)


def test_formats_of_experts_and_shared_expert_may_differ() -> None:
    inputs = moe_down_inputs(3, 48, 32, 64, 5, 2, "fp8_channel", torch.bfloat16, "cpu")
    for name in ("fp32", "nvfp4", "fp8_block"):
        inputs["shared_down"] = (quantize(inputs["shared_down"][0].dequantize(), name),)
        assert_rounded_alike(grouped(inputs), moe_down_reference(**inputs))
    # two matrices side by side, as where one of them could not be stacked
    whole = inputs["shared_down"][0].dequantize()
    inputs["shared_down"] = (quantize(whole[:16], "bf16"), quantize(whole[16:], "fp8_channel"))
    assert_rounded_alike(grouped(inputs), moe_down_reference(**inputs))


@pytest.mark.parametrize("ordered", [False, True])
def test_rows_of_the_kernel_do_not_disturb_each_other(ordered: bool) -> None:
    inputs = moe_down_inputs(19, 52, 22, 18, 6, 2, "bf16", torch.bfloat16, "cpu")
    inputs["ids"] = crowded(19, 6, 2)
    together = grouped(inputs, ordered=ordered)
    for some in ([18], [3, 1, 17], list(range(18, 1, -1))):
        part = {**inputs, **{key: inputs[key][some] for key in PER_ROW}}
        assert_same(grouped(part, ordered=ordered), together[some])


def test_tiled_experts_are_decoded_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared expert comes with the first slice alone."""
    monkeypatch.setattr("stepfloor.kernels._grouped.EXPERTS_AT_ONCE", 2)
    inputs = moved(moe_down_inputs(9, 64, 48, 32, 5, 3, "nvfp4", torch.bfloat16, "cpu"), DEVICE)
    whole = down_grouped(**inputs, ordered=True)
    poison_new_tensors(monkeypatch)
    tiled = pack_experts(inputs["down"], SLICES, False, tmp_path)
    assert_rounded_alike(down_grouped(**{**inputs, "down": tiled}), whole)


def compile_case(cut: Tiles, n: int, k: int, codes: str, scaling: str, **changes: Any) -> Case:
    """The kernel for matrices [n, k] and a shared expert of that size and format."""
    wide, ordered, arch = (
        changes.get(key, default) for key, default in (("wide", 0), ("ordered", False), ("arch", 90))
    )
    value = "*fp32" if wide else "*bf16"
    orders = ("order_ptr", "pair_starts_ptr", "tile_starts_ptr", "tile_experts_ptr")
    pointers = {"x_ptr": value, "out_ptr": value, "ids_ptr": "*i64", **dict.fromkeys(orders, "*i32")}
    pointers |= {"data_ptr": value if codes == "plain" else "*u8", "scale_ptr": "*u8", "factor_ptr": "*fp32"}
    pointers |= {
        f"shared_{name}": pointers[name] for name in ("x_ptr", "out_ptr", "data_ptr", "scale_ptr", "factor_ptr")
    }
    absent = () if ordered else orders
    absent += () if codes in ("mxfp8", "nvfp4") else ("scale_ptr", "shared_scale_ptr")
    absent += () if scaling != "none" else ("factor_ptr", "shared_factor_ptr")
    cut = cut.fit(n, k)
    constants: dict[str, Any] = dict.fromkeys(absent)
    constants |= {"EXPERTS": 512, "HELD": 512, "ORDERED": ordered, "N": n, "K": k, "CODES": codes, "SCALING": scaling}
    constants |= {"WIDE": wide, "NATIVE": arch >= 89, "SHARED_K": k, "SHARED_CODES": codes}
    constants |= {"SHARED_SCALING": scaling, "SHARED_WIDE": wide, "BLOCK_M": cut.rows, "BLOCK_N": cut.columns}
    constants |= {"BLOCK_K": cut.depth, "CHUNK": 64, "PDL": arch >= 90}
    integers = ("x_stride", "shared_x_stride", "pairs", "first", "groups", "shared_rows")
    aligned = (*pointers, *(("x_stride", "shared_x_stride") if k % 16 == 0 else ()))
    where = "stepfloor.kernels._grouped_down", "_products_kernel"
    return Case(*where, {**pointers, **dict.fromkeys(integers, "i32")}, constants, cut.warps, arch, cut.stages, aligned)


def test_kernels_compile() -> None:
    """The formats at the release's sizes, a small model in float32, and a GPU without FP8."""
    tensors = ("products_ptr", "weights_ptr", "gate_ptr", "shared_ptr", "out_ptr")
    sizes = {"N": 2560, "TOPK": 10, "BLOCK_N": 1024, "PDL": True}
    assert_compiles(
        [
            compile_case(DECODE, 2560, 640, "plain", "none"),
            compile_case(DECODE, 2560, 640, "fp8", "block"),
            compile_case(DECODE, 2560, 640, "nvfp4", "expert"),
            compile_case(PREFILL, 2560, 640, "plain", "none", ordered=True),
            compile_case(WIDE, 52, 22, "plain", "none", wide=True),
            compile_case(DECODE, 2560, 640, "mxfp8", "none", arch=80),
            Case(
                "stepfloor.kernels._grouped_down",
                "_sum_kernel",
                dict.fromkeys(tensors, "*bf16"),
                sizes,
                aligned=tensors,
            ),
        ]
    )
