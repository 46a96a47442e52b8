"""Losses by kind of kernel: nothing counted twice, nothing left out."""

import re
from pathlib import Path

import pytest

import stepfloor.kernels
from stepfloor.config import ModelConfig
from stepfloor.roofline.floor import checkpoint_step_bytes
from stepfloor.roofline.planned import CASES, planned_weights
from stepfloor.tools.bench.losses import EXPERTS, HEADER, KERNELS, PRODUCTS, REST, kind_of, losses_of
from stepfloor.tools.bench.profile import Operator, Profile

SHIPPED = Path(stepfloor.kernels.__file__).parent.parent / "shipped"
PROFILE = Profile(
    7,
    4,
    0,
    1,
    (),
    0,
    6.0,
    8.0,
    (
        Operator("linear_kernel", 1731.5, 146),
        Operator("moe_gate_up_kernel", 487.0, 48),
        Operator("moe_down_kernel", 218.0, 48),
        Operator("_commit_rows_kernel", 1.5, 1),
    ),
)


@pytest.mark.parametrize("spec_tokens", [0, 3])
def test_times_and_bytes_add_up_to_the_step(spec_tokens: int) -> None:
    config = ModelConfig.read(SHIPPED / "full_config.json")
    weights = planned_weights(config, CASES["a"])
    found = losses_of(PROFILE, config, weights, 1, spec_tokens, 700, 4400.0)
    assert sum(loss.us for loss in found) == pytest.approx(1731.5 + 487 + 218 + 1.5 + 14)
    step = checkpoint_step_bytes(config, weights, 1, spec_tokens, 700)
    assert sum(loss.num_bytes for loss in found) == pytest.approx(step.total)
    kinds = {loss.kind: loss for loss in found}
    # each layer's shared down matrix is read with the experts, the drafter's once a draft
    assert kinds[EXPERTS].num_bytes == pytest.approx(
        step.target.experts + sum(d.experts for d in step.drafts) + 2560 * 640 * 2 * (48 + spec_tokens)
    )
    assert kinds[EXPERTS].us == 705
    assert kinds[PRODUCTS].floor_us == pytest.approx(kinds[PRODUCTS].num_bytes / 4400e3)
    assert [loss.loss_us for loss in found] == sorted((loss.loss_us for loss in found), reverse=True)
    assert all(len(loss.line()) == len(HEADER) for loss in found)


def test_every_kernel_that_moves_weights_has_a_kind() -> None:
    """A kernel with a new name must not fall among the small ones of the step."""
    here = Path(stepfloor.kernels.__file__).parent
    names = {
        name
        for path in (*here.glob("*.py"), *here.glob("*.cu"))
        for name in re.findall(r"^def (_\w+_kernel)\(|(?:__global__.*?|\s)(\w+_kernel)\(const", path.read_text(), re.M)
        for name in name
        if name
    }
    small = {name for name in names if kind_of(name) == REST} - {"_has_cuda_kernel"}  # a question, no kernel
    assert len(names) > 40
    assert small == {
        *("_begin_rows_kernel", "_commit_rows_kernel", "_count_kernel", "_match_kernel", "_judge_kernel"),
        *("_ending_kernel", "_finish_kernel", "_part_kernel", "_pick_kernel", "_maxima_kernel", "_cut_kernel"),
        *("_write_kernel", "_stream_read_kernel"),
    }
    assert len({kind for kind, _ in KERNELS}) == len(KERNELS)
