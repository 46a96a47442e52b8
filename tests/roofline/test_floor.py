"""The byte model against the published tables of the released model, to the digits they print.

Source of every figure: sums of the releases' safetensors headers and the tables derived from them.
"""

from dataclasses import astuple
from pathlib import Path

import pytest

from stepfloor.roofline.bytes import distinct_experts, distinct_experts_deviation
from stepfloor.roofline.floor import GB, GIB, Floor, checkpoint_step_bytes, step_bytes
from stepfloor.roofline.groups import component_bytes, pass_group
from stepfloor.roofline.hardware import GPUS, find_gpu
from stepfloor.roofline.planned import CASES, Stored, WeightFormats, planned_weights
from stepfloor.weights.checkpoint import open_checkpoint
from tests.checkpoints import ALL_RELEASES, make_tiny
from tests.roofline.released import RELEASED

BANDWIDTHS_GBPS = [GPUS[name].bandwidth_gbps for name in ("GB10", "RTX 5090", "H100", "H200")]


def test_parameters_of_the_release() -> None:
    """A weight forgotten or counted twice moves these totals, which are exact."""
    weights = planned_weights(RELEASED, WeightFormats(table="bf16"))
    drafter = sum(w.num_bytes for name, w in weights.items() if name.startswith("mtp."))
    table = sum(w.num_bytes for name, w in weights.items() if pass_group(name) == "table")
    everything = sum(w.num_bytes for w in weights.values())
    assert drafter // 2 == 2_607_150_848
    assert table // 2 == 51_200_245_760
    assert (everything - drafter - table - 35 * 8) // 2 == 125_743_653_760  # 35 int64 hash constants
    assert everything + 2 * 448_931_056 == 359_999_963_128  # with the vision tower: the release


@pytest.mark.parametrize(
    ("tokens", "printed"),
    [(1, "10.0"), (2, "19.8"), (3, "29.4"), (4, "38.8"), (5, "48.1"), (8, "74.7"), (16, "138.6"), (32, "239.6")],
)
def test_distinct_experts(tokens: int, printed: str) -> None:
    assert f"{distinct_experts(tokens, 512, 10):.1f}" == printed


def test_deviation_of_distinct_experts() -> None:
    # two tokens, three experts: the same one for a third of them, else two
    assert distinct_experts_deviation(2, 3, 1) == pytest.approx((2 / 9) ** 0.5)
    # one token, all experts, or one: always as many
    assert distinct_experts_deviation(1, 512, 10) == pytest.approx(0, abs=1e-6)
    assert distinct_experts_deviation(4, 2, 2) == distinct_experts_deviation(4, 1, 1) == 0


def test_stored_components() -> None:
    bf16 = component_bytes(planned_weights(RELEASED, WeightFormats(table="nvfp4")))
    packed = component_bytes(planned_weights(RELEASED, CASES["c"]))
    assert {name: f"{bf16[name] / GIB:.3f}" for name in ("gdn", "qsa", "indexer", "hc", "router", "ple")} == {
        "gdn": "3.884",
        "qsa": "1.113",
        "indexer": "0.037",
        "hc": "1.193",
        "router": "0.117",
        "ple": "0.061",
    }
    assert f"{bf16['shared_experts'] / GIB:.3f}" == "0.439"
    assert f"{bf16['head'] / GIB:.3f}" == f"{bf16['embedding'] / GIB:.3f}" == "1.184"
    assert f"{bf16['experts'] / GIB:.1f}" == "225.0"
    assert f"{bf16['mtp_dense'] / GIB:.3f}" == "0.169"
    assert f"{bf16['mtp_experts'] / GIB:.3f}" == "4.688"
    assert f"{packed['experts'] / GIB:.2f}" == "63.28"
    assert f"{packed['table'] / GIB:.2f}" == "47.68"
    assert f"{bf16['table'] / GIB:.2f}" == "26.82"


TARGET_PASS = """
    1 a  1.327 7.099 0.254 1.271 0.226 10.178
    1 b  1.327 3.549 0.254 1.271 0.226 6.628
    1 b' 1.327 3.549 0.254 0.636 0.226 5.992
    1 c  1.327 3.549 0.254 0.656 0.226 6.012
    1 c' 1.327 3.549 0.254 0.358 0.226 5.714
    4 a  5.155 7.099 0.254 1.271 0.226 14.005
    4 b  5.155 3.549 0.254 1.271 0.226 10.456
    4 b' 5.155 3.549 0.254 0.636 0.226 9.820
    4 c  5.155 3.549 0.254 0.656 0.226 9.840
    4 c' 5.155 3.549 0.254 0.358 0.226 9.542
"""


@pytest.mark.parametrize("line", TARGET_PASS.strip().splitlines())
def test_target_pass(line: str) -> None:
    rows, case, *printed = line.split()
    target = step_bytes(RELEASED, CASES[case], spec_tokens=int(rows) - 1).target
    found = (target.experts, target.dense, target.other, target.head, target.state, target.total)
    assert [f"{value / GB:.3f}" for value in found] == printed


TARGET_MS = """
    1 a  37.28 5.68 3.04 2.12
    1 b  24.28 3.70 1.98 1.38
    1 b' 21.95 3.34 1.79 1.25
    1 c  22.02 3.36 1.79 1.25
    1 c' 20.93 3.19 1.71 1.19
    4 a  51.30 7.82 4.18 2.92
    4 b  38.30 5.83 3.12 2.18
    4 b' 35.97 5.48 2.93 2.05
    4 c  36.04 5.49 2.94 2.05
    4 c' 34.95 5.32 2.85 1.99
"""


@pytest.mark.parametrize("line", TARGET_MS.strip().splitlines())
def test_target_pass_in_milliseconds(line: str) -> None:
    rows, case, *printed = line.split()
    target = step_bytes(RELEASED, CASES[case], spec_tokens=int(rows) - 1).target
    assert [f"{target.total / column / 1e6:.2f}" for column in BANDWIDTHS_GBPS] == printed


DRAFTERS = {
    "bf16": (WeightFormats(), "1.551", "4.936"),
    "nvfp4 head": (WeightFormats(draft_head="nvfp4"), "0.637", "2.195"),
    "fp8 dense and head": (WeightFormats(mtp_dense="fp8_tensor", draft_head="fp8_tensor"), "0.828", "2.766"),
    "fp8 dense and experts, nvfp4 head": (
        WeightFormats(mtp_experts="fp8_tensor", mtp_dense="fp8_tensor", draft_head="nvfp4"),
        "0.500",
        "1.643",
    ),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter(name: str) -> None:
    formats, one_row, three_passes = DRAFTERS[name]
    step = step_bytes(RELEASED, formats, spec_tokens=3)
    assert f"{step.drafts[1].total / GB:.3f}" == one_row
    assert f"{step.draft_total / GB:.3f}" == three_passes


def test_parts_of_a_bf16_draft_pass() -> None:
    draft = step_bytes(RELEASED, CASES["a"], spec_tokens=3).drafts[2]
    assert [f"{value / GB:.3f}" for value in (draft.experts, draft.dense, draft.head)] == ["0.098", "0.175", "1.271"]


FULL_STEP = """
    a  18.942 69.4 10.57 5.65 3.95
    b' 12.587 46.1 7.02 3.76 2.62
    c  11.483 42.1 6.41 3.43 2.39
"""


@pytest.mark.parametrize("line", FULL_STEP.strip().splitlines())
def test_full_step(line: str) -> None:
    case, total, *printed = line.split()
    step = step_bytes(RELEASED, CASES[case], spec_tokens=3)
    assert f"{step.total / GB:.3f}" == total
    for column, text in zip(BANDWIDTHS_GBPS, printed, strict=True):
        digits = len(text.partition(".")[2])
        assert f"{Floor(step, column).step_us / 1e3:.{digits}f}" == text


def test_design_figures() -> None:
    """The floors the project quotes: 4.07 and 2.47 ms at the H200's measured 4.65 TB/s, 737 and 1,215 tokens/s."""
    bandwidth = GPUS["H200"].floor_gbps
    for case, milliseconds, rate in (("a", "4.07", 737), ("c", "2.47", 1215)):
        floor = Floor(step_bytes(RELEASED, CASES[case], spec_tokens=3), bandwidth)
        assert f"{floor.step_us / 1e3:.2f}" == milliseconds
        assert floor.tokens_per_s(3.0) == pytest.approx(rate, abs=1)
        assert floor.fraction(2 * floor.step_us) == 0.5


def test_context_reads() -> None:
    """Selected keys and values 50.4 MB, flat beyond 2051 tokens; block keys 768 B a token."""
    short = step_bytes(RELEASED, CASES["a"], spec_tokens=0, context_tokens=2048).target.context
    long = step_bytes(RELEASED, CASES["a"], spec_tokens=0, context_tokens=131072).target.context
    scan = 768 * 131072
    assert f"{scan / 1e6:.0f}" == "101"
    assert f"{(long - scan) / 1e6:.1f}" == "50.4"
    assert short == 2048 * 24576 + 768 * 2048
    # every sequence reads its own context, the drafter's layer once a draft pass
    step = step_bytes(RELEASED, CASES["a"], sequences=4, spec_tokens=2, context_tokens=2048)
    assert step.target.context == 4 * short
    assert [draft.context for draft in step.drafts] == [4 * short / 12] * 2


def test_a_checkpoint_stored_per_expert_and_in_shards_has_the_same_floor() -> None:
    planned = planned_weights(RELEASED, CASES["c"])
    split: dict[str, Stored] = {}
    for name, weight in planned.items():
        if name.endswith("experts.gate_up_proj"):
            half = Stored(weight.format, weight.num_bytes // 2 // 512)
            block = name.removesuffix("gate_up_proj")
            split |= {f"{block}{e}.{part}": half for e in range(512) for part in ("gate_proj", "up_proj")}
        elif name.endswith("ngram_embedding"):
            split |= {f"{name}.shard_{i}": Stored(weight.format, weight.num_bytes // 128) for i in range(128)}
            split[name] = Stored("fp8_tensor", 2)
        else:
            split[name] = weight
    assert astuple(checkpoint_step_bytes(RELEASED, split, spec_tokens=3).target) == pytest.approx(
        astuple(step_bytes(RELEASED, CASES["c"], spec_tokens=3).target), rel=1e-9
    )


@pytest.mark.parametrize("release", ALL_RELEASES)
def test_every_release_has_a_floor(release: str, tmp_path: Path) -> None:
    """A weight that the byte model does not know, or reads as something else, shows in one release or another."""
    checkpoint = open_checkpoint(make_tiny(tmp_path, release))
    step = checkpoint_step_bytes(checkpoint.config, checkpoint.weights, spec_tokens=2)
    if release == "bf16":
        assert step == step_bytes(checkpoint.config, WeightFormats(table="bf16"), spec_tokens=2)
    packed = {name: weight for name, weight in checkpoint.weights.items() if pass_group(name) == "experts"}
    assert step.target.experts < sum(weight.num_bytes for weight in packed.values())
    assert 0 < step.drafts[1].total < step.target.total


def test_one_head_for_both_is_stored_once() -> None:
    assert "mtp.lm_head" not in planned_weights(RELEASED, CASES["a"])
    assert "mtp.lm_head" in planned_weights(RELEASED, CASES["c"])


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"no weight named 'layers\.0\.surprise'"):
        pass_group("layers.0.surprise")


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H200", "H200"), ("NVIDIA RTX PRO 6000 Blackwell", "RTX PRO 6000"), ("NVIDIA GH200 480GB", None)],
)
def test_find_gpu(device: str, name: str | None) -> None:
    assert find_gpu(device) == (GPUS[name] if name else None)
