"""The start-up report said nothing about a GPU's operators; what it says must follow from the weights that are held."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import stepfloor
from stepfloor import kernels
from stepfloor.kernels._choose_form import plan_stream
from stepfloor.kernels._experts import pack_experts
from stepfloor.kernels._stream import outer_scales, pack_tape
from stepfloor.kernels._stream_product import StreamedWeight
from stepfloor.kernels.gdn_decode import decodes_on_cuda, gdn_decode_inputs
from stepfloor.kernels.hc_down import StreamedDown, hc_down_inputs, plan_down
from stepfloor.kernels.hc_mix import StreamedMix, hc_mix_inputs, pack_mix, plan_mix
from stepfloor.kernels.linear import linear_inputs
from stepfloor.kernels.moe_gate_up import moe_gate_up_inputs
from stepfloor.kernels.moe_route import routes_on_cuda
from stepfloor.kernels.ngram_gather import ngram_gather_table
from stepfloor.model.backends import (
    REFERENCE,
    Held,
    Machine,
    backends,
    experts_backend,
    table_backend,
    weights_backend,
)
from stepfloor.model.load import load_model
from stepfloor.weights.checkpoint import open_checkpoint

SHIPPED = Path(stepfloor.__file__).parent / "shipped"
GPU = Machine(gpu=True, triton=True, bf16=True)
CPU = Machine(gpu=False, triton=False, bf16=True)


def streamed_weight(name: str) -> StreamedWeight:
    (weight,) = linear_inputs(1, 64, 256, name, torch.bfloat16, "cpu")["weights"]
    plan = plan_stream(64, 256, 8, format_name=name)
    return StreamedWeight(plan, pack_tape(weight, plan), Path(), outer_scales(weight))


def streamed_down() -> StreamedDown:
    (weight,) = hc_down_inputs(1, 256, 20, "fp8_tensor", torch.bfloat16, "cpu")["down"]
    plan = plan_down(24, 20, 4, 256, 8, 1, format_name="fp8_tensor")
    return StreamedDown(plan, pack_tape(weight, plan.stream), Path(), outer_scales(weight))


def streamed_mix() -> StreamedMix:
    (weight,) = hc_mix_inputs(1, 64, 64, "bf16", torch.bfloat16, "cpu")["up"]
    plan = plan_mix(64, 4, 64, 8)
    tape, scales = pack_mix(weight, plan)
    return StreamedMix(plan, tape, Path(), scales)


def test_every_operator_is_named() -> None:
    """A new operator must say what runs it; stream_read measures the memory and is part of no step."""
    model = load_model(open_checkpoint(SHIPPED), 64, "cpu")
    files = {path.stem for path in Path(kernels.__file__).parent.glob("[a-z]*.py")} - {"stream_read"}
    assert backends(model, 4) == dict.fromkeys(sorted(files), REFERENCE)


@pytest.mark.parametrize("name", ["bf16", "fp8_block"])
def test_linear(name: str) -> None:
    streamed, (packed,) = streamed_weight(name), linear_inputs(1, 64, 256, "nvfp4", torch.bfloat16, "cpu")["weights"]
    assert weights_backend((streamed,), GPU) == f"CUDA, streamed {name}"
    assert weights_backend((streamed, packed), GPU) == f"CUDA, streamed {name} and Triton, nvfp4"
    assert weights_backend((packed,), replace(GPU, triton=False)) == REFERENCE
    assert weights_backend((streamed,), replace(GPU, bf16=False)) == REFERENCE
    assert weights_backend((streamed, packed), CPU) == REFERENCE


@pytest.mark.parametrize(("held", "name"), [(streamed_down(), "fp8_tensor"), (streamed_mix(), "bf16")])
def test_hyper_connections(held: Held, name: str) -> None:
    assert weights_backend((held,), GPU) == f"CUDA, streamed {name}"
    assert weights_backend((held,), replace(GPU, bf16=False)) == f"Triton, {name}"
    assert weights_backend((held,), CPU) == REFERENCE


def test_experts(tmp_path: Path) -> None:
    stored = moe_gate_up_inputs(2, 256, 64, 4, 2, "nvfp4", torch.bfloat16, "cpu")["gate_up"]
    tiled = pack_experts(stored, 4, True, tmp_path)
    assert experts_backend(tiled, GPU) == "CUDA, streamed nvfp4"
    assert experts_backend(tiled, replace(GPU, bf16=False)) == "Triton, nvfp4"
    assert experts_backend(stored, GPU) == "Triton, nvfp4"
    assert experts_backend(tiled, CPU) == experts_backend(stored, replace(GPU, triton=False)) == REFERENCE


def test_the_table() -> None:
    (shard,) = linear_inputs(1, 8, 32, "bf16", torch.bfloat16, "cpu")["weights"]
    table = ngram_gather_table((shard,), "cpu")
    assert table_backend(table, GPU) == "Triton, bf16"
    assert table_backend((shard,), GPU) == table_backend(table, CPU) == REFERENCE


def test_kernels_chosen_by_shape_and_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delta net and the router of the full model have CUDA kernels from compute capability 9.0 on."""
    constants = gdn_decode_inputs(1, 4, 16, 48, 128, 128, torch.bfloat16, "cpu")["constants"]
    monkeypatch.setattr("stepfloor.kernels.gdn_decode.missing_for_cuda", lambda: None)
    monkeypatch.setattr("stepfloor.kernels.moe_route.missing_for_cuda", lambda: None)
    # one device a chip, since reasons are kept by device
    for device, chip, wanted in ((torch.device("cuda", 100), (9, 0), True), (torch.device("cuda", 101), (8, 9), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, chip=chip: chip)
        assert decodes_on_cuda(constants, 4, device) is wanted
        assert routes_on_cuda(device, torch.bfloat16, 10) is wanted
        assert not routes_on_cuda(device, torch.float32, 10)
