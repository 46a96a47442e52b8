"""Tables others published about the released model, reproduced from generated headers, figures written out.

Where a source's own arithmetic does not hold, the test says what does; docs/bytes.md tells why.
"""

import math
from functools import lru_cache

import pytest

from stepfloor.formats.table import stored_bytes
from stepfloor.roofline.bytes import distinct_experts
from stepfloor.roofline.collectives import LINKS, exchange_us, prefill_collectives, step_collectives
from stepfloor.roofline.floor import GB, GIB
from stepfloor.roofline.groups import component_bytes
from stepfloor.roofline.hardware import GPUS
from stepfloor.roofline.levers import changed, parse_change
from stepfloor.roofline.passes import ByteModel, Matrices, by_component, fold, measured_routing, total
from stepfloor.roofline.shards import Shards, matrix_shapes
from stepfloor.weights.checkpoint import Checkpoint
from stepfloor.weights.releases import RELEASES, open_layout
from tests.roofline.released import RELEASED

PAIR = Shards(2, expert_parallel=True)


@lru_cache(maxsize=8)
def layout(release: str) -> Checkpoint:
    return open_layout(f"qwen3.8-flash-next:{release}")


@lru_cache(maxsize=8)
def folded(release: str) -> dict[str, Matrices]:
    return fold(layout(release).weights)


SIZES = {
    "bf16": (359_999_963_128, "335.28"),
    "nvfp4": (135_156_121_594, "125.87"),
    "nvidia-nvfp4": (132_639_846_394, "123.53"),
    "fp8": (185_502_232_570, "172.76"),
    "fp8dense": (130_980_311_802, "121.98"),
}


@pytest.mark.parametrize(
    "release", [pytest.param(r, marks=pytest.mark.slow) if r in ("fp8", "nvidia-nvfp4") else r for r in SIZES]
)
def test_size_of_a_release(release: str) -> None:
    """bf16 to the byte as published; RadixArk 125.87 GiB as reported; vendor 124 and 173, FP8 dense 122 as derived."""
    whole = layout(release).num_bytes + layout(release).vision_bytes
    nbytes, gib = SIZES[release]
    assert whole == nbytes
    assert f"{whole / GIB:.2f}" == gib


def test_parts_of_the_fp8_dense_release() -> None:
    """36 x 3 delta net, 12 x 4 attention, 96 x 3 + 2 hyper-connection, 48 x 3 shared expert matrices and the head."""
    quantized = [name for name, weight in layout("fp8dense").weights.items() if weight.format == "fp8_channel"]
    assert len(quantized) == 36 * 3 + 12 * 4 + 96 * 3 + 2 + 48 * 3 + 1 == 591
    assert not [name for name in quantized if name.startswith("mtp.")]


# Seed table of components, GiB of the RadixArk checkpoint: what was printed, and what the headers give.
COMPONENTS = {
    "routed experts": ("63.28", "63.28"),
    "n-gram table": ("47.75", "47.68"),  # printed with the n-gram projections, 0.06: 47.75 to the rounding
    "drafter experts": ("4.69", "4.69"),
    "delta net": ("3.89", "3.88"),  # printed with convolutions and vectors
    "hyper-connections": ("1.19", "1.19"),
    "head": ("1.18", "1.18"),
    "embedding": ("1.18", "1.18"),
    "attention": ("1.11", "1.11"),
    "shared expert": ("0.44", "0.44"),
    "router": ("0.12", "0.12"),
    "indexer": ("0.04", "0.04"),
    "vision": ("0.84", "0.84"),
}


def test_component_table_of_a_two_device_review() -> None:
    sizes = component_bytes(layout("nvfp4").weights)
    drafter = sizes["mtp_dense"]
    found = {
        "routed experts": sizes["experts"],
        "n-gram table": sizes["table"],
        "drafter experts": sizes["mtp_experts"],
        "delta net": sizes["gdn"],
        "hyper-connections": sizes["hc"],
        "head": sizes["head"],
        "embedding": sizes["embedding"],
        "attention": sizes["qsa"],
        "shared expert": sizes["shared_experts"],
        "router": sizes["router"],
        "indexer": sizes["indexer"],
        "vision": layout("nvfp4").vision_bytes,
    }
    assert {name: f"{size / GIB:.2f}" for name, size in found.items()} == {
        n: ours for n, (_, ours) in COMPONENTS.items()
    }
    # where the printed figure differs, what was counted with it
    assert f"{(sizes['table'] + sizes['ple']) / GIB:.3f}" == "47.745"
    assert f"{(sizes['gdn'] + sizes['vectors']) / GIB:.2f}" == "3.89"
    assert f"{drafter / GIB:.2f}" == "0.17"  # in no row of the source
    packed = 48 * 512 * 3 * 640 * 2560 // 2
    assert f"{packed / GIB:.2f}" == "56.25"
    assert f"{packed / 8 / GIB:.2f}" == "7.03"  # one scale byte for 16 codes of half a byte


# Seed table of a step on each of two devices, verify of 4 tokens and three draft passes, GiB: printed, ours.
STEP = {
    "head": ("2.36", "2.37"),  # printed as four times 0.59, which is 0.592
    "routed experts": ("2.1", "1.98"),  # 32 x 48 x 2.77 MB / 2 is 2.13 GB: the source wrote GB in a column of GiB
    "delta net": ("1.95", "1.94"),  # half of 3.89
    "hyper-connections": ("1.19", "1.19"),
    "attention and indexer": ("0.60", "0.59"),
    "drafter": ("0.5", "0.49"),
    "router, shared expert, n-gram": ("0.40", "0.40"),
    "recurrent state": ("0.1", "0.11"),
}


def step_of_two_devices() -> dict[str, float]:
    """GiB on each device with 32 distinct experts a layer for 4 tokens; all draft passes over one row, as printed."""
    model = ByteModel(RELEASED, folded("nvfp4"), PAIR)
    routing = measured_routing(4, 32, 512, 10)
    target = by_component(model.target(1, 4, routing=routing))
    draft = by_component(model.draft(1, 1))
    gib = {name: size / GIB for name, size in target.items()}
    return {
        "head": gib["head"] + 3 * draft["head"] / GIB,
        "routed experts": gib["experts"],
        "delta net": gib["gdn"],
        "hyper-connections": gib["hc"],
        "attention and indexer": gib["qsa"] + gib["indexer"],
        "drafter": 3 * sum(size for name, size in draft.items() if name != "head") / GIB,
        "router, shared expert, n-gram": gib["router"] + gib["shared_experts"] + gib["ple"],
        "recurrent state": gib["recurrent state"],
    }


def test_step_table_of_a_two_device_review() -> None:
    found = step_of_two_devices()
    assert {name: f"{gib:.2f}" for name, gib in found.items()} == {name: ours for name, (_, ours) in STEP.items()}
    assert f"{sum(float(printed) for printed, _ in STEP.values()):.1f}" == "9.2"
    assert f"{sum(found.values()):.1f}" == "9.1"
    # with the first draft pass over the four verified rows, as the software runs it, the sum is the printed one
    model = ByteModel(RELEASED, folded("nvfp4"), PAIR)
    passes = model.step(1, 3, routing=measured_routing(4, 32, 512, 10))
    assert f"{sum(total(p) for p in passes) / GIB:.1f}" == "9.2"


def test_expert_bytes_of_a_verification() -> None:
    """1.7 to 2.7 GiB were given for the range of overlaps: 27 to 43 distinct experts; uniform choice gives 38.8."""
    expert = 3 * stored_bytes("nvfp4", 640, 2560) * 48 / 2
    assert f"{27 * expert / GIB:.1f} {43 * expert / GIB:.1f}" == "1.7 2.7"
    assert f"{distinct_experts(4, 512, 10):.1f}" == "38.8"


def test_rate_of_a_two_device_review() -> None:
    """36 ms at 273 GB/s, 40 to 42 at 245 to 235, 24 to 25 steps/s, 53 to 56 tokens/s at 2.2 a step."""
    step = 9.2 * GIB
    assert f"{step / 273 / 1e6:.0f}" == "36"
    slow, fast = step / 235 / 1e6, step / 245 / 1e6
    assert (round(fast), round(slow)) == (40, 42)
    assert (round(1e3 / slow), round(1e3 / fast)) == (24, 25)
    # the printed 53 is 24 steps/s rounded before the product
    assert (round(2.2e3 / slow), round(2.2e3 / fast)) == (52, 55)


def test_fp8_dense_what_if() -> None:
    """The source halves 6.9 GiB of 9.2 and comes to 5.7; its own checkpoint leaves router, indexer, n-gram projections
    and the drafter in bf16, so 3.1 GiB are saved and 6.0 remain."""
    weights = folded("nvfp4")
    after = changed(weights, RELEASED, parse_change("dense=fp8,head=fp8", 248_320))
    routing = measured_routing(4, 32, 512, 10)

    def step(of: dict[str, Matrices]) -> float:
        return sum(total(p) for p in ByteModel(RELEASED, of, PAIR).step(1, 3, routing=routing)) / GIB

    assert f"{9.2 - 6.9 / 2:.2f}" == "5.75"
    assert f"{step(weights) - step(after):.1f}" == "3.1"
    assert f"{step(after):.1f}" == "6.0"
    # the layout of the release itself reads the same
    assert step(folded("fp8dense")) == pytest.approx(step(after), rel=1e-4)


@pytest.mark.slow
def test_official_fp8_reads_more_than_nvfp4() -> None:
    """Its dense layers are bf16, its experts 8 bit."""
    fp8, nvfp4, dense = (
        sum(total(p) for p in ByteModel(RELEASED, folded(r)).step(1, 3)) for r in ("fp8", "nvfp4", "fp8dense")
    )
    assert fp8 > nvfp4 > dense


@pytest.mark.parametrize(("gbps", "printed"), [(1792, "0.709"), (273, "4.66"), (4800, "0.265")])
def test_floor_of_the_head(gbps: float, printed: str) -> None:
    """248,320 x 2,560 in bf16: 1,271,398,400 bytes, 1.184 GiB. In MXFP8 0.61, in NVFP4 0.333."""
    head = stored_bytes("bf16", 248_320, 2560)
    assert head == 1_271_398_400
    digits = len(printed.partition(".")[2])
    assert f"{head / gbps / 1e6:.{digits}f}" == printed
    assert f"{head / GIB:.3f}" == "1.184"
    assert f"{stored_bytes('mxfp8', 248_320, 2560) / GIB:.2f}" == "0.61"
    assert f"{stored_bytes('nvfp4', 248_320, 2560) / GIB:.3f}" == "0.333"


def test_the_head_of_a_whole_step() -> None:
    """Four reads of 0.77 ms are 31 % of a step of 10 ms; 2.36 of 9.2 GiB are 26 %."""
    assert f"{4 * 0.77 / 10.06:.2f}" == "0.31"
    assert f"{step_of_two_devices()['head'] / 9.2:.2f}" == "0.26"


def test_head_bandwidth_of_a_trace() -> None:
    """0.852 ms is 1.492 TB/s, 83 % of 1,792 GB/s."""
    reached = 1_271_398_400 / 0.852e-3 / 1e12
    assert f"{reached:.3f}" == "1.492"
    assert f"{reached / 1.792:.2f}" == "0.83"


def test_expert_call_at_its_floor() -> None:
    """33 experts of 2.637 MiB are 87 MiB, 334.2 us at 273 GB/s."""
    expert = 3 * (640 * 2560 // 2 + 640 * 2560 // 16)
    assert f"{expert / 2**20:.3f}" == "2.637"
    assert f"{33 * expert / 2**20:.0f}" == "87"
    assert f"{33 * expert / 273e3:.1f}" == "334.2"


def test_table_rows() -> None:
    """160 bytes and 47.68 GiB in FP8; 80 + 10 = 90 bytes and 26.82 GiB in NVFP4, so groups of 16."""
    rows = RELEASED.ngram_hash.rows
    assert rows == 320_001_536
    assert f"{rows * 160 / GIB:.2f}" == "47.68"
    assert f"{rows * 90 / GIB:.2f}" == "26.82"
    assert f"{100_000 * 90 / 2**20:.2f}" == "8.58"


def test_floors_of_small_products() -> None:
    """Hyper-connection down 25.2 us, up 24.0, router 9.6 at 273 GB/s, of 6.56, 6.25 and 2.50 MiB."""
    shapes = matrix_shapes(RELEASED)
    sizes = {name: 2 * math.prod(shapes[name]) for name in ("hc down and inject", "hc up", "router")}
    assert [f"{size / 2**20:.2f}" for size in sizes.values()] == ["6.56", "6.25", "2.50"]
    assert [f"{size / 273e3:.1f}" for size in sizes.values()] == ["25.2", "24.0", "9.6"]


def test_exchanges_of_a_step() -> None:
    """36 + 12 + 48 of 20 KB, one of logits, 9 in the draft passes: 106; 2 to 3 ms at 20 to 30 us."""
    found = step_collectives(RELEASED, 1, 3, PAIR)
    counts = {c.what: c.count for c in found}
    assert [counts[w] for w in ("gated delta net out", "attention out", "experts out", "logits")] == [36, 12, 48, 1]
    assert sum(counts.values()) == 106
    assert {c.num_bytes for c in found if c.what.endswith("net out")} == {20_480}
    logits = next(c for c in found if c.what == "logits")
    assert f"{logits.num_bytes / 2 / 1e6:.0f}" == "2"  # a device sends its half of the vocabulary
    assert (106 * 20, 106 * 30) == (2120, 3180)
    first, last = exchange_us(found, LINKS["roce"], 2)
    assert 2_120 < first < 2_400
    assert 4_240 < last < 4_500
    assert step_collectives(RELEASED, 1, 3, Shards(1)) == ()


def test_exchanges_of_a_prompt_chunk() -> None:
    """96 all-reduces of 42 MB: 4.03 GB, 161 ms at 25 GB/s."""
    (chunk,) = prefill_collectives(RELEASED, 8192, PAIR)
    assert (chunk.count, f"{chunk.num_bytes / 1e6:.0f}") == (96, "42")
    assert f"{chunk.count * chunk.num_bytes / GB:.2f}" == "4.03"
    first, _ = exchange_us((chunk,), LINKS["roce"], 2)
    assert f"{(first - 96 * 20) / 1e3:.0f}" == "161"


def test_experts_of_a_prompt_chunk() -> None:
    """8,192 tokens touch all experts: 68 GB, 34 on each of two devices, 140 ms at 245 GB/s."""
    assert distinct_experts(8192, 512, 10) == pytest.approx(512)
    whole = component_bytes(layout("nvfp4").weights)["experts"]
    assert f"{whole / GB:.0f} {whole / 2 / GB:.0f}" == "68 34"
    assert f"{whole / 2 / 245e6:.0f}" == "139"


@pytest.mark.parametrize(("context", "share"), [(1024, "0.2"), (65_536, "0.7"), (262_144, "1.8")])
def test_decode_is_weight_traffic(context: int, share: str) -> None:
    """At 1K, 64K and 262K tokens the target reads that many percent of its bytes for attention."""
    parts = by_component(ByteModel(RELEASED, folded("nvfp4")).target(1, 4, context))
    read = parts["keys and values"] + parts["block keys"]
    assert f"{100 * read / sum(parts.values()):.1f}" == share


def test_overlap_of_experts_is_fitted() -> None:
    """33 distinct experts for 4 tokens: each further token chooses 0.79 of a set of its own."""
    routing = measured_routing(4, 33, 512, 10)
    assert routing.distinct(1, 4, 512, 10) == pytest.approx(33)
    assert routing.distinct(1, 1, 512, 10) == pytest.approx(10)
    assert f"{routing.independence:.2f}" == "0.79"
    # tokens of other sequences are independent
    assert routing.distinct(4, 1, 512, 10) == pytest.approx(distinct_experts(4, 512, 10))
    with pytest.raises(ValueError, match="touch 10 to 40 experts; got 41"):
        measured_routing(4, 41, 512, 10)


def test_uneven_experts() -> None:
    """Of 32 experts on two devices the busier one has 18.3 on average, by the binomial distribution."""
    mean = sum(math.comb(32, i) / 2**32 * max(i, 32 - i) for i in range(33))
    assert PAIR.busiest(32) * 16 == pytest.approx(mean, rel=0.01)
    assert Shards(2).busiest(32) == 1.0


def test_folding_loses_nothing() -> None:
    for release in RELEASES:
        if release in ("bf16", "nvfp4", "fp8dense"):
            assert sum(w.num_bytes for w in folded(release).values()) == layout(release).num_bytes
    experts = folded("nvfp4")["layers.0.mlp.experts.gate_proj"]
    assert (experts.count, experts.n, experts.k) == (512, 640, 2560)
    table = folded("nvfp4")["layers.1.ple.ple_embedding.ngram_embedding"]
    assert (table.n, table.k) == (320_001_536, 160)
    fused = folded("bf16")["layers.0.mlp.experts.gate_up_proj"]
    assert (fused.count, fused.n, fused.k) == (1024, 640, 2560)


def test_every_device_names_its_source() -> None:
    assert all(device.source for device in GPUS.values())
