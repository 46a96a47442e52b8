"""Each benchmark of a kernel runs to its last line without a GPU, where a wrong name would cost minutes.

A CPU stands where the GPU would. A graph is the torch calls that were made while it was captured, made again into the
same results; an event tells a clock that goes on by one step; a process of its own runs here; NVRTC and the driver
are left out, so a CUDA kernel writes nothing. The checks have to see that: each family of such kernels is WRONG, while
operators that run their references here pass. What is timed is then told which families passed. Times are those of the
clock, so what counts is what is called how often, and what is printed.
"""

import contextlib
import faulthandler
import functools
import io
import json
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import (
    delta_many,
    delta_net,
    delta_net_checks,
    delta_net_prefill,
    edges,
    experts,
    experts_checks,
    experts_layer,
    experts_plans,
    grouped_experts,
    harness,
    hyper_connection,
    linear,
    linear_checks,
    linear_plans,
    pairs,
    sampling,
    sparse_attention,
)
from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels import _jit
from stepfloor.kernels._choose_form import plan_stream
from stepfloor.kernels._pair import StreamedPair
from stepfloor.kernels._stream_product import StreamedWeight

GPU = types.SimpleNamespace(name="no GPU", multi_processor_count=132, shared_memory_per_multiprocessor=228 * 1024)
MODULES = {
    f"benchmarks.{module.__name__.split('.')[-1]}": module
    for module in (delta_many, delta_net, edges, experts, hyper_connection, linear, pairs, sampling, sparse_attention)
}


class Graph(TorchDispatchMode):
    """What stands for a CUDA graph; capturing is being inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        if Event.timing:
            return  # only the clock goes on
        for func, args, kwargs, result in self.calls:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Event:
    """Each is a millisecond after the one before."""

    clock = 0
    timing = False

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0

    def record(self) -> None:
        Event.clock += 1
        Event.timing = not Event.timing
        self.at = Event.clock

    def elapsed_time(self, end: "Event") -> float:
        return float(end.at - self.at)


class Inline:
    """A pool that runs what it is given at once."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *given: object) -> None:
        pass

    def map(self, run: Callable[[Any], Any], jobs: Iterable[Any], chunksize: int = 1) -> list[Any]:
        return [run(job) for job in jobs]


class Process:
    """`python3 -m module arguments`, run here."""

    def __init__(self, module: str, *arguments: str) -> None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                self.returncode = run(module, *arguments)
            except Exception:
                self.returncode = 1
                printed.write(traceback.format_exc())
        self.stdout = io.StringIO(printed.getvalue())

    def communicate(self, timeout: float) -> tuple[str, None]:
        return self.stdout.getvalue(), None

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *given: object) -> None:
        pass


def run(module: str, *arguments: str) -> int:
    before = sys.argv
    sys.argv = [module, *arguments]
    try:
        return MODULES[module].main()
    finally:
        sys.argv = before


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A machine with a CPU for a GPU; the sources that were asked to be compiled."""
    found: list[str] = []

    def compile_cuda(source: str, text: bytes, headers: object, options: list[str]) -> bytes:
        found.append(source)
        return b""

    loaded = _jit.Launch

    def launch(self: Any, cubin: bytes, name: str, device: torch.device, *given: int, **named: Any) -> None:
        assert not torch.utils._python_dispatch._get_current_dispatch_mode(), f"{name} is loaded while captured"

    monkeypatch.setattr(_jit, "_compile", compile_cuda)
    monkeypatch.setattr(_jit, "_store", lambda path, cubin: "not kept: it is none")
    monkeypatch.setattr(_jit, "_nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(loaded, "__init__", launch)
    monkeypatch.setattr(loaded, "__call__", lambda self, arguments: None)
    monkeypatch.setattr(loaded, "clusters_at_once", 33)
    monkeypatch.setattr(harness, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(harness, "READ_VALUES", 1 << 10)
    monkeypatch.setattr(harness, "ROTATED_BYTES", 1e6)
    monkeypatch.setattr(harness, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(harness, "ThreadPoolExecutor", Inline)
    monkeypatch.setattr(harness, "start", Process)
    for module in MODULES.values():
        if hasattr(module, "start"):
            monkeypatch.setattr(module, "start", Process)
        if hasattr(module, "CACHE_DIR"):
            monkeypatch.setattr(module, "CACHE_DIR", tmp_path)
        if hasattr(module, "ROTATED_BYTES"):
            monkeypatch.setattr(module, "ROTATED_BYTES", 1e6)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *given, **named: None)
    for name, stand_in in {
        "CUDAGraph": Graph,
        "graph": lambda graph: graph,
        "Event": Event,
        "synchronize": lambda *given: None,
        "empty_cache": lambda: None,
        "set_device": lambda device: None,
        "get_device_properties": lambda device: GPU,
        "get_device_name": lambda device=None: GPU.name,
        "get_device_capability": lambda device=None: (9, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    yield found
    for name, module in list(sys.modules.items()):  # no launch that was made here may be found by another test
        if name.startswith("stepfloor.kernels"):
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def put(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], *modules: types.ModuleType) -> None:
    """Other values of constants, wherever they are imported."""
    for name, value in values.items():
        owners = [module for module in modules if hasattr(module, name)]
        assert owners, name
        for module in owners:
            monkeypatch.setattr(module, name, value)


def passing(right: Iterable[str]) -> Callable[..., set[str]]:
    """In place of check_apart, once the checks have said what they had to."""
    return lambda module, families, arguments, limit_s: set(families) & set(right)


LINEAR = (linear, linear_checks, linear_plans)
SHAPES = {"head": (320, 256), "gdn_in": (200, 256), "qsa_in": (144, 128), "out": (64, 6144), "router_shared": (65, 64)}
SHAPES |= {"shared_down": (48, 64), "hc_down": (36, 10240), "hc_up": (10240, 64)}


@pytest.fixture
def small_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = ("head", "out", "hc_down")
    put(monkeypatch, {"SHAPES": SHAPES, "ODD_SHAPES": [(16, 16), (37, 48)], "QUICK_SHAPES": quick}, *LINEAR)
    put(monkeypatch, {"CHECKED_ROWS": (1, 3, 17)}, *LINEAR)


@pytest.mark.usefixtures("small_linear")
@pytest.mark.parametrize("family", ["ring", "cluster", "spread", "share", "group", "mxfp8 share"])
def test_a_product_that_writes_nothing_is_wrong(
    family: str, compiled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("benchmarks.linear", "--quick", "--check", family) == 1
    assert f"check {family}: WRONG" in capsys.readouterr().out


@pytest.mark.usefixtures("small_linear")
def test_linear(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(linear, "check_apart", passing(linear_plans.FAMILIES))
    output = tmp_path / "linear.json"
    arguments = ["--formats", "bf16,fp8_channel", "--rows", "1,17", "--rounds", "3", "--json", str(output)]
    assert run("benchmarks.linear", *arguments, "--cache-dir", str(tmp_path)) == 0
    found, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert not found["failed"] + found["broken"]
    assert {r["shape"] for r in found["rows"]} == set(SHAPES)
    assert set(found["rows"][0]) == {"shape", "format", "n", "k", "rows", "kernel", "us", "floor_us", "fraction"}
    assert {"bf16 1", "bf16 17", "fp8_channel 17"} <= set(found["chain"])
    assert set(found["dense_bytes_per_s"]) == {"bf16", "fp8_channel"}
    assert {"linear.cu", "stream_dense.cu"} <= set(compiled)
    assert "0 do not compile" in printed
    assert "default: M=1" in printed
    assert json.loads(printed.splitlines()[-1])["us"]


@pytest.mark.usefixtures("small_linear")
def test_what_is_wrong_gets_no_times(compiled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--shapes", "qsa_in", "--formats", "bf16", "--rows", "1", "--families", "ring,wide"]
    assert run("benchmarks.linear", *arguments) == 1
    printed = capsys.readouterr().out
    line = json.loads(printed.splitlines()[-1])
    assert (line["passed"], line["failed"], line["broken"]) == ([], ["ring", "wide"], [])
    assert list(line["us"]) == ["qsa_in/bf16/1/cuBLAS"]
    assert "M=1 not timed" in printed


@pytest.mark.usefixtures("small_linear")
def test_pairs(compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = (pairs.Shape("a", 512, 0, 32), pairs.Shape("b", 256, 64, 1))
    put(monkeypatch, {"SHAPES": small, "K": 256}, pairs)

    def repack(weight: PackedWeight, device: object, cache_dir: Path, most: int) -> StreamedWeight:
        return linear_plans.streamed(weight, plan_stream(*weight.shape, 100, format_name=weight.format), cache_dir)

    def join(stored: list[PackedWeight], device: torch.device, cache_dir: Path, most: int) -> tuple[StreamedPair]:
        first = next(weight for weight in stored if weight.format != "bf16")
        rows = sum(weight.shape[0] for weight in stored if weight is not first)
        second = linear_plans.random_matrix(rows, pairs.K, "bf16", device)
        before = 0 if first is stored[0] else stored[0].shape[0]
        return (StreamedPair(repack(first, 0, cache_dir, 0), repack(second, 0, cache_dir, 0), before),)

    monkeypatch.setattr(pairs, "linear_repack", repack)
    monkeypatch.setattr(pairs, "linear_join", join)
    monkeypatch.setattr(pairs, "linear", lambda x, weights: x.new_zeros(len(x), sum(w.shape[0] for w in weights)))
    assert run("benchmarks.pairs", "--rows", "1,4", "--formats", "fp8_channel", "--blocks", "1,2", "--rounds", "2") == 0
    printed = capsys.readouterr().out
    assert re.search(r"^b +fp8_channel +M=4 +us: apart \d+\.\d\d, pair \d", printed, re.MULTILINE)
    assert printed.endswith("every bit is that of the matrix alone\n")


EXPERTS = (experts, experts_checks, experts_layer, experts_plans, grouped_experts)


@pytest.fixture
def small_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, {"EXPERTS": 12, "TOPK": 3, "D": 640, "WIDTH": 320}, *EXPERTS)
    put(monkeypatch, {"GATE_UP_BYTES": 230400, "DOWN_BYTES": 115200}, *EXPERTS)
    put(monkeypatch, {"CHECKED_ROWS": (1, 4), "CHAIN_ROWS": (1, 16), "CASES": ((1, 3), (16, 8)), "LAYERS": 2}, *EXPERTS)
    put(monkeypatch, {"DECODE_ROWS": (1,), "PREFILL_ROWS": (30,), "CALLS": 2}, *EXPERTS)


@pytest.mark.usefixtures("small_experts")
@pytest.mark.parametrize("family", experts_checks.FAMILIES)
def test_an_expert_that_writes_nothing_is_wrong(
    family: str, compiled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the choices: moe_route runs its reference here."""
    assert run("benchmarks.experts", "--check", family) == int(family != "route")
    verdict = "ok" if family == "route" else "WRONG"
    assert f"check {family}: {verdict}" in capsys.readouterr().out


@pytest.mark.usefixtures("small_experts")
def test_experts(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(experts, "check_apart", passing(experts_checks.FAMILIES))
    monkeypatch.setattr(experts_plans, "groups_for", lambda rows: (1,) if rows == 1 else (2,))
    output = tmp_path / "experts.json"
    arguments = ["--decode-only", "--rounds", "2", "--rows", "1,16", "--json", str(output)]
    assert run("benchmarks.experts", *arguments) == 0
    found, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert {(r["rows"], r["part"]) for r in found["rows"]} == {
        (rows, part) for rows in (1, 16) for part in ("gate_up", "down", "pair", "pair late")
    }
    assert {"1/3/pair", "16/8/down"} <= set(found["best"])
    assert set(compiled) >= {"moe_gate_up.cu", "moe_down.cu", "moe_down_many.cu"}
    assert "route (experts, weights" in printed
    assert re.search(r"^ +16 +8  pair +\S.* \+ .* \d", printed, re.MULTILINE)


@pytest.mark.slow  # 11 s of a core
@pytest.mark.usefixtures("small_experts")
def test_experts_of_other_formats(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """grouped_experts, in what stands for its processes; the operators run their references."""
    monkeypatch.setattr(experts, "check_apart", passing(("chain", "route")))
    for name in ("gate_up_grouped", "down_grouped"):  # Triton, which only a GPU or a patient reader runs
        monkeypatch.setattr(grouped_experts, name, lambda *given, **named: given[0].clone())
    output = tmp_path / "experts.json"
    assert run("benchmarks.experts", "--quick", "--rounds", "2", "--json", str(output)) == 0
    found, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert found["failed"] == []
    assert {(r["part"], r["format"], r["rows"]) for r in found["grouped"]} == {
        *(("decode", name, rows) for name in grouped_experts.DECODE_FORMATS for rows in (1,)),
        *(("prefill", name, rows) for name in grouped_experts.PREFILL_FORMATS for rows in (30,)),
    }
    assert re.search(r"^prefill +nvfp4 +30 +\d+  layer ", printed, re.MULTILINE)
    assert re.search(r"^decode +bf16 +1 +\d+  gate_up 16x128/4 ", printed, re.MULTILINE)
    assert "target 70% of the floor" in printed


@pytest.mark.usefixtures("small_experts")
def test_the_layer_of_experts(compiled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("benchmarks.experts", "--layer", "--rows", "1,2", "--rounds", "2") == 1
    printed = capsys.readouterr().out
    assert "2 rows, now / before: 1.000 (1.000 to 1.000)" in printed
    assert "1 rows, us a layer: before " in printed
    assert "now: other bits, or not finite" in printed  # nothing was written over NaN


DELTA = (delta_net, delta_net_checks, delta_net_prefill, delta_many)


@pytest.fixture
def few_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    families = {name: plans[:1] for name, plans in list(delta_net_checks.FAMILIES.items())[:2]}
    put(monkeypatch, {"FAMILIES": families}, delta_net, delta_net_checks)
    put(monkeypatch, {"TIMED": [(1, 1, 1), (2, 2, 1)]}, *DELTA)
    monkeypatch.setattr(delta_net, "streamed", lambda n, k, device, cache_dir: (n, k))
    for module in (delta_net, delta_many):
        monkeypatch.setattr(module, "streamed", lambda n, k, device, cache_dir: (n, k))
        monkeypatch.setattr(module, "stream_product", lambda x, weight, out: out.shape[1] == weight[0] or 1 / 0)


@pytest.mark.usefixtures("few_delta")
def test_delta_net_decode(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    families = list(delta_net_checks.FAMILIES)
    monkeypatch.setattr(delta_net, "check_all", lambda cache_dir: families)
    output = tmp_path / "delta.json"
    assert run("benchmarks.delta_net", "--only", "decode", "--rounds", "2", "--json", str(output)) == 0
    found, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert set(found["decode"]) == {"best", "chain", "rows"}
    assert set(found["decode"]["chain"]) == {"1x1", "2x2"}
    assert "2x2 settled any" in found["decode"]["best"]
    assert set(compiled) == {"gdn_decode.cu"}
    assert "RECOMMENDED" in printed


def test_a_delta_net_that_writes_nothing_is_wrong(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"key_heads": 2, "heads": 4, "key_dim": 64, "value_dim": 64}
    plan = replace(delta_net_checks.FAMILIES["as before"][0], **sizes)
    put(monkeypatch, {"SIZES": tuple(sizes.values()), "FAMILIES": {"as before": [plan]}}, *DELTA)
    assert delta_net.check_all(Path()) == []
    printed = capsys.readouterr().out
    assert "FAILED as before" in printed
    assert "16 columns, 2 blocks, early 1, 2 sequences, 1 rows: " in printed


def test_delta_net_of_prompts_and_without_cuda(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The Triton kernels are replaced by their references; sizes are the small model's."""
    from stepfloor.kernels.gdn_decode import gdn_decode_reference
    from stepfloor.kernels.gdn_prefill import gdn_prefill_reference

    put(monkeypatch, {"SIZES": (2, 4, 64, 64)}, *DELTA)
    put(monkeypatch, {"PREFILL_ROWS": (16, 40)}, delta_net_prefill)
    monkeypatch.setattr(delta_net, "gdn_decode_triton", gdn_decode_reference)
    monkeypatch.setattr(
        delta_net_prefill, "gdn_prefill_triton", lambda plan=None, **inputs: gdn_prefill_reference(**inputs)
    )
    monkeypatch.setattr(delta_net_prefill, "prefill_error", lambda plan, device: (0.0, 1.0))
    monkeypatch.setattr(delta_net_prefill, "prefill_kernels", lambda device: None)
    output = tmp_path / "delta.json"
    arguments = ["--only", "prefill", "portable", "--rounds", "2", "--json", str(output)]
    assert run("benchmarks.delta_net", *arguments) == 0
    found, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert all(set(times) == {"16", "40"} for times in found["prefill"].values())
    assert "4 heads of 64, 4 x 4" in found["portable"]
    assert "best prefill of 40 rows" in printed


@pytest.mark.usefixtures("few_delta")
def test_delta_many(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    put(monkeypatch, {"CHECKED": ((2, 1, 1),), "LAYERS": 2}, delta_many)
    assert run("benchmarks.delta_many", "--rounds", "2") == 1
    assert "is not near the reference" in capsys.readouterr().out
    monkeypatch.setattr(delta_many, "check_reference", lambda inputs, out, state: [])
    output = tmp_path / "many.json"
    assert run("benchmarks.delta_many", "--rounds", "2", "--json", str(output)) == 0
    found, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert set(found["us"]) == {"1x1", "2x2"}
    assert {"floor", "fused", "two blocks", "row of fused"} <= set(found["us"]["2x2"])
    assert re.search(r"^two blocks, rows only +-?\d", printed, re.MULTILINE)


HYPER = (hyper_connection,)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, {"CHECKED_ROWS": (1, 4), "ALONE": (0, 3), "PAIRS": 2, "ROUTERS": 2, "MAX_ROWS": 16}, *HYPER)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("family", ["down bf16", "mix mxfp8"])
def test_a_hyper_connection_that_writes_nothing_is_wrong(
    family: str, compiled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("benchmarks.hyper_connection", "--check", family) == 1
    assert f"check {family}: WRONG" in capsys.readouterr().out


@pytest.mark.usefixtures("few_rows")
def test_hyper_connection(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(hyper_connection, "check_apart", passing(hyper_connection.FAMILIES))
    output = tmp_path / "hc.json"
    assert run("benchmarks.hyper_connection", "--rows", "1,4", "--rounds", "2", "--json", str(output)) == 0
    found, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert {"pair torch", "down fp8", "mix mxfp8", "part norms", "pair bf16, then the router"} <= set(found["us"]["4"])
    assert "share of the floor, pair bf16: M=1" in printed
    assert "target down M=4: 4.2 us" in printed


@pytest.mark.slow  # 15 s of a core
def test_edges(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Operators run their references here: they are right, and a replayed graph is the eager run."""

    def one_by_one(x: Tensor, weights: tuple[PackedWeight]) -> Tensor:
        return torch.stack([weights[0].dequantize() @ row for row in x.float()]).to(edges.BF16)

    put(monkeypatch, {"SHARD_ROWS": 300, "PREFILL": 20, "D": 256, "RANK": 16}, edges)
    put(monkeypatch, {"PRODUCTS": dict.fromkeys(edges.PRODUCTS, (48, 64))}, edges)
    fewer = {name: (make, (4,) if 4 in rows else (20,)) for name, (make, rows) in edges.PARTS.items()}
    chosen = {name: fewer[name] for name in fewer if not name.startswith(("product", "ngram_gather"))}
    chosen |= {name: fewer[name] for name in ("product,up,nvfp4", "ngram_gather,fp8_tensor,device")}
    put(monkeypatch, {"PARTS": chosen}, edges)
    monkeypatch.setattr(edges, "packed_product", one_by_one)
    output = tmp_path / "edges.json"
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        ended = run("benchmarks.edges", "--rounds", "2", "--json", str(output))
    finally:
        torch.use_deterministic_algorithms(deterministic)
    found, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert (ended, found["failed"]) == (0, []), printed
    assert set(found["us"]) == set(chosen)
    assert set(found["us"]["ple_mix"]["4"]) == {"us", "bytes", "fraction"}


def test_sparse_attention(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    put(monkeypatch, {"CONTEXTS": [(70, 128)], "DECODE": [(2, 1)], "LONGEST": 256, "LAYERS": 1}, sparse_attention)
    monkeypatch.setattr(sparse_attention, "chain_length", lambda b, r, context: 2)
    small = sparse_attention.Layers
    monkeypatch.setattr(
        sparse_attention,
        "Layers",
        lambda b, r, context, table, layers, device: small(min(b, 2), min(r, 4), min(context, 70), 128, layers, device),
    )
    for name in ("prepare", "select", "attend"):
        check = getattr(sparse_attention, f"check_{name}")
        monkeypatch.setattr(
            sparse_attention,
            f"check_{name}",
            lambda b, r, context, device, check=check: check(min(b, 2), min(r, 4), min(context, 40), device),
        )
    operator = sparse_attention.qsa_attend
    monkeypatch.setattr(sparse_attention, "attend_triton", operator)
    monkeypatch.setattr(sparse_attention, "attend_rows", lambda plan, *given: operator(*given))
    monkeypatch.setattr(sparse_attention, "shared_limit", lambda device: 227 * 1024)
    output = tmp_path / "attention.json"
    assert run("benchmarks.sparse_attention", "--rounds", "2", "--json", str(output)) == 0
    found, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert found["failed"] == []
    assert len(found["check"]) == 9
    assert set(found["decode"][0]["us"]) == {"prepare", "select", "attend", "all"}
    assert [line["context"] for line in found["chunk"]] == [0, 8192]
    assert set(found["plans"][0]["us"]) == {
        "two",
        *map(str, range(4, 9)),
    }
    assert "70 short table" in printed


def test_sampling(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from stepfloor.kernels.accept_drafts import accept_drafts_reference
    from stepfloor.kernels.draw_tokens import draw_tokens_reference
    from stepfloor.kernels.process_logits import process_logits_reference

    put(monkeypatch, {"VOCAB": 1100, "ROWS": (1, 4)}, sampling)
    monkeypatch.setattr(sampling, "ROTATED_BYTES", 1.0)
    for operator in (accept_drafts_reference, draw_tokens_reference, process_logits_reference):
        monkeypatch.setattr(sampling, operator.__name__.replace("reference", "triton"), operator)
    output = tmp_path / "sampling.json"
    ended = run("benchmarks.sampling", "--rounds", "2", "--json", str(output))
    found, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert (ended, found["failed"]) == (0, []), printed
    assert set(found["4 rows"]) > set(found["1 rows"])
    assert set(found["host"]) == set(sampling.SETTINGS)


def test_processes_are_limited_and_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """One that hangs is ended and says so; what a failed one complained about is kept; order is that of the jobs."""
    jobs = {"slow": ["-n", "1", "-r", "1", "import time; print('begun', flush=True); time.sleep(60)"]}
    jobs |= {"good": ["-n", "1", "-r", "1", "pass"], "bad": ["-n", "1", "-r", "1", "1 / 0"]}
    ended = list(harness.run_apart("timeit", jobs, 3))
    assert [(name, right) for name, right, _ in ended] == [("slow", False), ("good", True), ("bad", False)]
    assert [text.splitlines()[-1] for _, _, text in ended][::2] == [
        "HANGS, no end in 3 s",
        "ZeroDivisionError: division by zero",
    ]
    assert "begun" in ended[0][2]
    process = harness.start("timeit", "-n", "1", "-r", "1", "print('one'); print('two')")
    assert harness.follow(process).startswith("1 loop")
    assert process.returncode == 0
    assert capsys.readouterr().out == "one\ntwo\n"


def test_what_does_not_compile_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In processes of their own, by NVRTC, as before a run on a GPU."""
    if (missing := _jit.missing_for_cuda()) is not None:
        pytest.skip(missing)
    monkeypatch.setattr(harness, "device_arch", lambda device: "sm_90a")
    kernels = [harness.Kernel("a plan", "moe_route.cu", {}), harness.Kernel("the same", "moe_route.cu", {})]
    harness.compile_all(kernels, tmp_path, torch.device("cpu"))
    printed = capsys.readouterr().out
    assert printed.startswith("1 kernels, 1 do not compile\n")
    assert "moe_route.cu does not compile" in printed


@pytest.mark.parametrize("module", sorted(MODULES))
def test_help(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(module, "--help")
    assert ended.value.code == 0
    assert "--rounds" in capsys.readouterr().out


def test_medians_take_turns(compiled: list[str]) -> None:
    """Two rounds that do not count, then as many as asked for, in an order that is reversed every time."""
    order: list[str] = []
    graphs = {name: types.SimpleNamespace(replay=functools.partial(order.append, name)) for name in "abc"}
    times: Any = harness.medians_us(graphs, 4, 3)  # pyrefly: ignore[bad-argument-type]
    assert "".join(order) == "cba" + "abc" + "cba" + "abc" + "cba"
    assert times == {"a": 250.0, "b": 250.0, "c": 250.0}
