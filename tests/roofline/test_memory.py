"""The memory plan: what the engine allocates, to the byte, and refusals that show their arithmetic."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from stepfloor.cache.tensors import allocate
from stepfloor.config import EngineConfig
from stepfloor.kernels import qsa_select
from stepfloor.roofline import memory
from stepfloor.roofline.memory import (
    Capacity,
    MemoryPlan,
    Placement,
    cgroup_available,
    discrete_capacity,
    parse_meminfo,
    plan_memory,
    unified_capacity,
)
from stepfloor.roofline.planned import CASES, planned_weights
from stepfloor.roofline.shards import Shards, matrix_shapes
from stepfloor.step.step import STAGE_SETS
from tests.roofline.released import RELEASED, SHIPPED

GIB = 1 << 30
MANY = discrete_capacity(10_000 * GIB, 10_000 * GIB)


def plan(capacity: Capacity, placement: Placement | None = None, **engine: int) -> MemoryPlan:
    asked = EngineConfig(**engine)  # type: ignore[arg-type]
    return plan_memory(RELEASED, planned_weights(RELEASED, CASES["a"]), asked, capacity, placement)


def line(of: MemoryPlan, component: str) -> int:
    return sum(one.nbytes for one in of.lines if one.component == component)


@pytest.mark.parametrize(
    "engine",
    [
        EngineConfig(spec_tokens=3, max_num_seqs=1, max_model_len=300, block_size=64),
        EngineConfig(spec_tokens=0, max_num_seqs=5, max_model_len=1001, block_size=16),
        EngineConfig(spec_tokens=7, max_num_seqs=3, max_model_len=64, block_size=128),
        EngineConfig(spec_tokens=2, max_num_seqs=2, max_model_len=200, kv_cache_dtype="fp8"),
        EngineConfig(spec_tokens=1, max_num_seqs=4, max_model_len=200, num_gpu_blocks_override=9),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cache_lines_are_what_the_engine_allocates(engine: EngineConfig, dtype: torch.dtype) -> None:
    """A shape that changes in cache/tensors.py alone would make the plan promise what is not there."""
    cache = allocate(SHIPPED, engine, dtype)

    def size(*tensors: torch.Tensor) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    lines = {
        x.component: x.nbytes
        for x in memory.cache_lines(SHIPPED, engine, memory.placement_of(engine), activation_bytes=dtype.itemsize)
    }
    assert lines == {
        "keys and values": size(*cache.keys, *cache.values),
        "block keys": size(*cache.block_keys),
        "index keys": size(*cache.raw_keys),
        "page table": size(cache.page_table),
        "recurrent state": size(*cache.state),
        "pending rows": size(*cache.raw_rows),
        "pending gates": size(*cache.gate_rows),
        "n-gram history": size(cache.ngram_rows),
    }


def test_a_refusal_says_how_many_pages_fit() -> None:
    """Sixteen sequences of the whole context are 105 GiB; as many pages as there is room for serve most of them."""
    device = discrete_capacity(139 * GIB, 200 * GIB)
    asked: dict[str, int] = {"max_num_seqs": 16, "max_model_len": 262_144}
    refused = plan(device, Placement("pinned", "bf16"), **asked)
    refusal = refused.refusal()
    assert refusal is not None
    assert f"--num-gpu-blocks-override {refused.max_pages} fits" in refusal
    assert plan(device, Placement("pinned", "bf16"), **asked, num_gpu_blocks_override=refused.max_pages).fits
    more = plan(device, Placement("pinned", "bf16"), **asked, num_gpu_blocks_override=refused.max_pages + 1)
    assert not more.fits
    assert more.max_pages == refused.max_pages
    # a context needs a sequence's pages, whatever room there is
    longest = plan(MANY, max_num_seqs=2, max_model_len=640, spec_tokens=0, num_gpu_blocks_override=11).max_model_len
    assert longest == 11 * 64 - 1


def test_sizes_per_token_of_the_release() -> None:
    """24,576 bytes a token in bf16, 12,288 in fp8, 12 layers; 2,048 and 1,024 more with the drafter's layer."""
    for dtype, drafts, wanted in (("bf16", 0, 24_576), ("fp8", 0, 12_288), ("bf16", 3, 26_624), ("fp8", 3, 13_312)):
        placement = Placement(kv_dtype=dtype)  # type: ignore[arg-type]
        sizes = [
            line(plan(MANY, placement, max_model_len=n, spec_tokens=drafts), "keys and values") for n in (6400, 12_800)
        ]
        assert sizes[1] - sizes[0] == 6400 * wanted
    # and a block key of 128 values for 4 tokens and layer
    keys = [line(plan(MANY, max_model_len=n, spec_tokens=0), "block keys") for n in (6400, 12_800)]
    assert keys[1] - keys[0] == 6400 * 768


def test_constant_state_of_one_sequence() -> None:
    """113,246,208 bytes of recurrent state, 2,211,840 of convolution rows, 184,320 of n-gram rows, 20,480 of R."""
    assert memory.state_copy_bytes(RELEASED) == 113_246_208 + 2_211_840 + 184_320 + 20_480 + 16
    two, one = (line(plan(MANY, max_num_seqs=n, spec_tokens=0), "recurrent state") for n in (2, 1))
    assert two - one == 113_246_208


@pytest.mark.parametrize(
    ("context", "printed"), [(8192, "0.21"), (32_768, "0.84"), (131_072, "3.35"), (262_144, "6.70")]
)
def test_storage_by_context(context: int, printed: str) -> None:
    """Keys, values and block keys with the drafter's layer, in GiB as published."""
    assert f"{context * (26_624 + 832) / GIB:.2f}" == printed
    whole = plan(MANY, max_model_len=context)
    assert line(whole, "keys and values") + line(whole, "block keys") == pytest.approx(context * 27_456, rel=0.03)


def test_one_request_of_a_million_tokens() -> None:
    """15.17 GiB were reported for one of 1 MiB tokens with fp8 keys and values, pages of another engine included: ours
    take 13,312 bytes a token and 832 of block keys, 13.81 GiB, which a pool of 6.9 to 8.1 GiB does not hold either."""
    assert f"{(1 << 20) * (13_312 + 832) / GIB:.2f}" == "13.81"
    config = replace(RELEASED, max_position_embeddings=1 << 20)
    weights = planned_weights(RELEASED, CASES["a"])
    small = discrete_capacity(96 * GIB, 200 * GIB)
    asked = EngineConfig(max_model_len=1 << 20, max_num_seqs=8)
    refused = plan_memory(config, weights, asked, small, Placement("pinned", "fp8")).refusal()
    assert refused is not None
    assert "keys and values 104." in refused
    assert "GiB short" in refused


def test_unified_memory_counts_what_is_available() -> None:
    """The driver counts file pages as used: 2.8 GiB free of 121.7, but 52 available."""
    text = "MemTotal: 127611699 kB\nMemFree: 2936013 kB\nMemAvailable: 54525952 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
    capacity = unified_capacity(parse_meminfo(text), device_free=int(2.8 * GIB))
    assert capacity.device_bytes == 52 * GIB
    assert "the driver calls 2.8 GiB free" in capacity.note
    engine = EngineConfig(max_model_len=4096, spec_tokens=0)

    def sized(gib: int) -> MemoryPlan:
        bare = plan_memory(RELEASED, {}, engine, capacity)
        experts = planned_weights(RELEASED, CASES["a"])["layers.0.mlp.experts.gate_up_proj"]
        rest = gib * GIB + capacity.device_reserve - bare.total("device")
        return plan_memory(
            RELEASED,
            {"layers.0.mlp.experts.gate_up_proj": replace(experts, num_bytes=rest)},
            engine,
            capacity,
            Placement(expert_workspace_bytes=0),
        )

    assert sized(45).fits
    refusal = sized(60).refusal()
    assert refusal is not None
    assert "unified memory: wanted 66.00 GiB" in refusal
    assert "routed experts" in refusal
    assert "reserve 6.00" in refusal
    assert "52.00 GiB are available, 14.00 GiB short" in refusal
    swapping = unified_capacity({"MemAvailable": 52 * GIB, "SwapTotal": 8 * GIB, "SwapFree": 5 * GIB})
    assert "3.0 GiB are swapped out" in swapping.note


def test_table_on_the_host_never_counts_on_the_device() -> None:
    """51.2 GB of table, a device of 24 GB, a host of 60: mapped fits; pinned does not fit 50 and says what does."""
    weights = {n: w for n, w in planned_weights(RELEASED, CASES["a"]).items() if ".experts." not in n}
    engine = EngineConfig(spec_tokens=0)

    def place(table: memory.TablePlace, host: int) -> MemoryPlan:
        return plan_memory(RELEASED, weights, engine, discrete_capacity(24 * 10**9, host * 10**9), Placement(table))

    assert place("mmap", 60).fits
    assert place("pinned", 60).fits
    assert place("direct", 60).fits
    assert place("pinned", 60).total("device") == place("mmap", 60).total("device")
    assert place("device", 60).total("device") - place("mmap", 60).total("device") == 320_001_536 * 160 + 2
    refusal = place("pinned", 50).refusal()
    assert refusal is not None
    assert refusal.startswith("host memory: wanted 51.68 GiB (n-gram table 47.68 + reserve 4.00); 46.57 GiB are avail")
    assert "--ngram-table mmap" in refusal


def test_pinned_table_on_unified_memory_lies_in_the_pool() -> None:
    capacity = unified_capacity({"MemAvailable": 100 * GIB})
    pinned = plan(capacity, Placement("pinned"))
    assert pinned.total("host") == 0
    assert [x.note for x in pinned.lines if x.component == "n-gram table"] == [
        "pinned in the pool that the device uses too: nothing is gained"
    ]
    assert plan(capacity, Placement("pinned")).total("device") == plan(capacity, Placement("device")).total("device")


@pytest.mark.parametrize("gib", [80, 90, 96, 139])
def test_what_is_said_to_fit_fits_and_one_more_does_not(gib: int) -> None:
    weights = planned_weights(RELEASED, CASES["c"])
    engine = EngineConfig(max_num_seqs=4, max_model_len=32_768, max_num_batched_tokens=2048)
    capacity, placement = discrete_capacity(gib * GIB, 128 * GIB), Placement("pinned")

    def fits(**change: int) -> bool:
        return plan_memory(RELEASED, weights, replace(engine, **change), capacity, placement).fits  # type: ignore[arg-type]

    found = plan_memory(RELEASED, weights, engine, capacity, placement)
    assert found.max_model_len == 0 or fits(max_model_len=found.max_model_len)
    assert found.max_model_len == RELEASED.max_position_embeddings or not fits(max_model_len=found.max_model_len + 1)
    assert found.max_num_seqs == 0 or fits(max_num_seqs=found.max_num_seqs)
    assert found.max_num_seqs == 256 or not fits(max_num_seqs=found.max_num_seqs + 1)


def test_a_drafter_that_does_not_draft_is_not_loaded() -> None:
    with_drafts, without = plan(MANY, spec_tokens=1), plan(MANY, spec_tokens=0)
    assert line(with_drafts, "weights: drafter experts") == 512 * 4_915_200 * 2
    assert line(without, "weights: drafter experts") == 0


def test_one_layer_of_experts_is_decoded_for_a_prompt() -> None:
    """512 experts of 4,915,200 parameters in bf16; a chunk of 4 tokens reaches 40 of them; bf16 experts need none."""
    assert line(plan(MANY, max_num_batched_tokens=2048), "workspace: experts") == 512 * 4_915_200 * 2
    assert line(plan(MANY, max_num_batched_tokens=4), "workspace: experts") == 40 * 4_915_200 * 2
    assert line(plan(MANY, Placement(expert_workspace_bytes=GIB)), "workspace: experts") == GIB
    bf16 = plan_memory(RELEASED, planned_weights(RELEASED, replace(CASES["a"], experts="bf16")), EngineConfig(), MANY)
    assert line(bf16, "workspace: experts") == 0


def test_graphs_are_those_that_the_step_captures() -> None:
    """One for each number of sequences, of drafts, and set of sampler stages; none where steps are not captured."""
    assert len(STAGE_SETS) == memory.SAMPLER_STAGE_SETS
    for sequences, count in ((1, 1), (3, 3), (16, 5), (24, 6)):
        asked = EngineConfig(spec_tokens=3, max_num_seqs=sequences)
        note = next(one.note for one in plan_memory(SHIPPED, {}, asked, MANY).lines if one.component == "graphs")
        assert note == f"at most: {count * len(STAGE_SETS)} of them"
    asked = EngineConfig(spec_tokens=3, max_num_seqs=16, spec_tokens_per_batch_size=((1, 4, 3), (5, 16, 1)))
    assert len(asked.decode_shapes) == 5
    assert line(plan_memory(SHIPPED, {}, replace(asked, enforce_eager=True), MANY), "graphs") == 0


def test_block_scores_of_a_million_tokens() -> None:
    """4 rows by 250 K columns are 4 MB, as reported for a pass and layer; a chunk's are made in runs of rows."""
    assert memory.index_score_bytes(4, 1_000_000, 4) == 4_000_000
    assert memory.SCORE_WORKSPACE_BYTES == qsa_select.WORKSPACE_BYTES
    assert qsa_select._tile(8192, torch.bfloat16)[0] == memory.SCORE_TILE_ROWS
    million = replace(RELEASED, max_position_embeddings=1 << 20)
    for context, rows in ((32_768, 6400), (262_144, 800), (1_000_000, 209), (1 << 20, 200)):
        asked = EngineConfig(max_model_len=context, max_num_batched_tokens=8192)
        planned = line(plan_memory(million, {}, asked, MANY), "workspace: block scores")
        assert planned == rows * context


def test_two_devices() -> None:
    """Experts, projections, both vocabulary matrices and the table halved; hyper-connections and router whole."""
    weights, engine = planned_weights(RELEASED, CASES["a"]), EngineConfig(max_model_len=8192)
    one = plan_memory(RELEASED, weights, engine, MANY)
    two = plan_memory(RELEASED, weights, engine, MANY, shards=Shards(2, True))
    for component in ("routed experts", "gated delta net", "sparse attention", "head", "embedding", "shared experts"):
        assert line(two, f"weights: {component}") == pytest.approx(line(one, f"weights: {component}") / 2, rel=1e-3)
    for component in ("hyper-connections", "router", "indexer", "n-gram projections"):
        assert line(two, f"weights: {component}") == line(one, f"weights: {component}")
    assert line(two, "n-gram table") == -(-line(one, "n-gram table") // 2)
    assert line(two, "keys and values") * 2 == line(one, "keys and values")
    assert line(two, "recurrent state") * 2 == line(one, "recurrent state")


SHAPES = {
    1: "248320x2560 512x2560 1x2560 1280x2560 2560x640 336x10240 320x10240 10240x320 16384x2560 96x2560 13312x2560 "
    "13952x2560 640x2560 2560x6144",
    2: "124160x2560 512x2560 1x2560 640x2560 2560x320 336x10240 320x10240 10240x320 8192x2560 48x2560 6656x2560 "
    "7296x2560 2560x3072",
    4: "62080x2560 512x2560 1x2560 320x2560 2560x160 336x10240 320x10240 10240x320 4096x2560 24x2560 3584x2560 "
    "4224x2560 640x2560 2560x1536",
}


@pytest.mark.parametrize("devices", SHAPES)
def test_matrix_shapes(devices: int) -> None:
    """Shapes for which others tuned their products: 1 and 2 devices as published, 4 by the same rules."""
    found = {f"{n}x{k}" for n, k in matrix_shapes(RELEASED, Shards(devices)).values()}
    assert found == set(SHAPES[devices].split())


def test_the_plan_needs_no_torch() -> None:
    program = "import sys, stepfloor.roofline.memory; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": "src"})


def test_a_containers_own_limit() -> None:
    """MemAvailable is the whole host's: a container with 40 GiB was planned 200 and killed while it loaded."""
    idle = f"anon 5\ninactive_file {3 * GIB}\n"
    assert (
        cgroup_available({"memory.max": f"{40 * GIB}\n", "memory.current": f"{10 * GIB}\n", "memory.stat": idle})
        == 33 * GIB
    )
    assert cgroup_available({"memory.max": "max\n", "memory.current": "5\n"}) is None
    assert cgroup_available({"memory.max": "5", "memory.current": "9"}) == 0
    older = {"memory.limit_in_bytes": "100", "memory.usage_in_bytes": "30", "memory.stat": "total_inactive_file 7"}
    assert cgroup_available(older) == 77
    assert cgroup_available({}) is None
