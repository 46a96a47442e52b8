"""The sampling kernels as a GPU's compiler sees them, with every stage and with none."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.kernels.compiled import Case, assert_compiles

STAGES = "bias_ptr repetition_ptr frequency_ptr presence_ptr counts_ptr in_prompt_ptr earlier_ptr"
TYPES = {
    "logits_ptr": "*bf16",
    "in_prompt_ptr": "*u8",
    **dict.fromkeys(
        [
            "temperature_ptr",
            "bias_ptr",
            "repetition_ptr",
            "frequency_ptr",
            "presence_ptr",
            "kept_ptr",
            "best_ptr",
            "tops_ptr",
            "sums_ptr",
            "scale_ptr",
            "proposals_ptr",
            "proposal_scale_ptr",
            "first_ptr",
            "second_ptr",
            "maxima_ptr",
            "min_p_ptr",
            "top_p_ptr",
            "out_ptr",
        ],
        "*fp32",
    ),
    **dict.fromkeys(
        [
            "slots_ptr",
            "earlier_ptr",
            "positions_ptr",
            "seeds_ptr",
            "drafts_ptr",
            "drawn_ptr",
            "emitted_ptr",
            "accepted_ptr",
            "tokens_ptr",
            "top_k_ptr",
        ],
        "*i64",
    ),
    **dict.fromkeys(
        ["counts_ptr", "ids_ptr", "first_ids_ptr", "second_ids_ptr", "kind_ptr", "chosen_ptr", "cut_ptr"], "*i32"
    ),
    **dict.fromkeys(
        [
            "logits_stride",
            "float_stride",
            "seed_stride",
            "kept_stride",
            "scale_stride",
            "drafts_stride",
            "top_k_stride",
            "vocab",
            "rows",
            "parts",
            "groups",
            "noise_stream",
        ],
        "i32",
    ),
}
PLAIN = dict.fromkeys(STAGES.split())
ROWS = {"EARLIER": 3, "SCALE": True, "PDL": True}
GREEDY = {**PLAIN, "EARLIER": 0, "SCALE": False, "PDL": True}
NO_Q = {"kept_ptr": None, "tops_ptr": None, "sums_ptr": None}
PARTS = 128
# what a launch with these values makes of integers that are 1
ONES = {"rows": 1, "float_stride": 1}


def case(file: str, name: str, constants: Mapping[str, Any], types: Mapping[str, str] | None = None) -> Case:
    warps = 8 if name == "_cut_kernel" else 4 if "BLOCK" in constants else 1
    return Case(f"stepfloor.kernels.{file}", name, TYPES | (types or {}), constants, warps)


CASES = [
    case("draw_tokens", "_part_kernel", GREEDY | NO_Q | {"seeds_ptr": None, "LOOPS": 4, "BLOCK": 2048}),
    case("draw_tokens", "_part_kernel", ROWS | {"LOOPS": 1, "BLOCK": 2048}),
    case(
        "draw_tokens",
        "_part_kernel",
        ROWS | ONES | {"EARLIER": 0, "seed_stride": 1, "noise_stream": 1, "LOOPS": 1, "BLOCK": 2048},
    ),
    case("draw_tokens", "_pick_kernel", {"PARTS": PARTS, "PDL": True}),
    case("draw_tokens", "_pick_kernel", {"parts": 1, "float_stride": 1, "PARTS": 1, "PDL": True}),
    case("match_drafts", "_match_kernel", {"K": 3, "COLUMNS": 4, "FORCED": -1, "PDL": True}),
    case("match_drafts", "_match_kernel", {"K": 3, "COLUMNS": 4, "FORCED": 2, "PDL": True}),
    case("count_tokens", "_count_kernel", {"WIDTH": 3, "COLUMNS": 4, "PDL": True}),
    case("accept_drafts", "_sum_kernel", ROWS | {"BLOCK": 2048}),
    case("accept_drafts", "_judge_kernel", ROWS | {"K": 3, "KEPT": 4, "PARTS": PARTS}),
    case("accept_drafts", "_judge_kernel", ROWS | {"K": 1, "KEPT": 1, "PARTS": 1, "parts": 1}),
    case("accept_drafts", "_ending_kernel", ROWS | {"K": 3, "KEPT": 4, "BLOCK": 2048}),
    case(
        "accept_drafts",
        "_ending_kernel",
        GREEDY | {"K": 3, "KEPT": 3, "BLOCK": 2048},
        {"logits_ptr": "*fp32"},
    ),
    case("accept_drafts", "_finish_kernel", {"K": 3, "PARTS": PARTS, "PDL": True}),
    case("process_logits", "_maxima_kernel", ROWS | {"BLOCK": 2048, "GROUP": 32}),
    case("process_logits", "_cut_kernel", ROWS | {"PARTS": PARTS, "GROUPS": 8192, "GROUP": 32, "FEW": 128}),
    case(
        "process_logits",
        "_cut_kernel",
        GREEDY
        | {"min_p_ptr": None, "top_k_ptr": None, "top_p_ptr": None}
        | {"PARTS": PARTS, "GROUPS": 8192, "GROUP": 32, "FEW": 128},
    ),
    case(
        "process_logits",
        "_cut_kernel",
        ROWS | ONES | {"parts": 1, "top_k_stride": 1, "PARTS": 1, "GROUPS": 64, "GROUP": 32, "FEW": 128},
    ),
    case("process_logits", "_write_kernel", ROWS | {"BLOCK": 2048}),
]


QUICK = ("_part_kernel", "_judge_kernel")


def test_the_largest_compile() -> None:
    assert_compiles([c for c in CASES if c.name in QUICK and c.constants.get("EARLIER") == 3])


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 120])
def test_every_kernel_compiles(arch: int) -> None:
    assert_compiles([replace(c, arch=arch) for c in CASES])
