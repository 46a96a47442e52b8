"""Long contexts at full size: keys and values in bf16 and fp8, the memory plan as a limit, the table in pinned memory.

    PYTHONPATH=src python3 -m benchmarks.contexts [--contexts 700,8192,65536,262144] [--spec-tokens 0] [--json FILE]

Random weights in format a with a quarter of the n-gram table (`--table-fraction 1` for all of it), drawn once. A cell
is one sequence with a random prompt, prefilled in chunks of 2,048 and then --steps decode steps of the engine's own
loop, as `bench step` times them. The plan of the cell is made before it runs, and torch's allocator may not pass it:
what the plan calls its total, less its reserve for the driver, is set as the process's limit, so a plan that is
too small is an out-of-memory error here. Beside it stands what was held at most. What the plan cannot know is added to
it: rotary tables for the longest cell, which all cells share. The last cell reads the n-gram table from pinned host
memory, beside one that reads it from the device.

`--yarn 4 --contexts 1000000 --kv auto --no-pinned` goes to a million tokens: positions and their limit times four, as
YaRN scales them.

Prefill is timed once, with the first token; `prompt s` is its wall time. The floor counts keys and values in bf16.
"""

import argparse
import faulthandler
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

import stepfloor
from stepfloor.config import EngineConfig, ModelConfig
from stepfloor.engine import EXPERT_WORKSPACE_BYTES, Engine, host_memory, open_device
from stepfloor.errors import UserError
from stepfloor.model.load import _Loader, load_model
from stepfloor.model.model import Model
from stepfloor.model.random import RandomTensors
from stepfloor.roofline.floor import Floor, checkpoint_step_bytes
from stepfloor.roofline.memory import MemoryPlan, discrete_capacity, placement_of, plan_memory
from stepfloor.step.bandwidth import read_bandwidth_gbps
from stepfloor.tools.bench.step import MIXES, WARM_UP_STEPS, Plan, _config, _prompt_tokens, _steps, random_checkpoint
from stepfloor.weights.checkpoint import Checkpoint

FULL = Path(stepfloor.__file__).parent / "shipped" / "full_config.json"
GIB = 1 << 30
PINNED_CONTEXT = 8192


@dataclass(frozen=True)
class Measured:
    """One cell. Times in milliseconds, memory in GiB; 0 where there is no GPU to ask.

    planned   the plan's total, reserve included, and the rotary tables of the longest cell
    held      most that the device held for all processes while the cell ran; allocated  most that torch had given out
    failed    what went wrong, or nothing
    """

    context: int
    kv: str
    table: str
    spec_tokens: int
    step_ms: float = 0.0
    median_ms: float = 0.0
    floor_ms: float = 0.0
    prompt_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    planned: float = 0.0
    held: float = 0.0
    allocated: float = 0.0
    failed: str = ""

    @property
    def kept(self) -> bool:
        """Whether the plan held."""
        return not self.failed and self.held <= self.planned

    def line(self) -> str:
        """One row of the table."""
        head = f"{self.context:8} {self.kv:>5} {self.table:>7} {self.spec_tokens:2}"
        if self.failed:
            return f"{head}  FAILED: {self.failed}"
        return (
            f"{head} {self.step_ms:9.3f} {self.median_ms:9.3f} {self.floor_ms:9.3f} {self.prompt_s:8.2f} "
            f"{self.prefill_tokens_per_s:9.0f} {self.planned:9.2f} {self.held:9.2f} {self.allocated:9.2f}  "
            f"{'kept' if self.kept else 'BROKEN'}"
        )


HEADER = " context    kv   table  k   step ms    median  floor ms prompt s  tokens/s plan GiB      held allocated  plan"


def main() -> int:
    """1 if a cell failed or a plan was broken."""
    options = parse()
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    begin = time.perf_counter()
    open_device(options.device)

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    config = yarn_config(options.config, options.yarn)
    if options.table_fraction < 1:
        config = replace(
            config, ngram_vocab_size_base=max(97, int(config.ngram_vocab_size_base * options.table_fraction))
        )
    checkpoint = random_checkpoint(config, MIXES["a"])
    cells = [(c, kv, "device") for c in options.contexts for kv in options.kv or ("auto", "fp8")]
    if options.pinned and options.device != "cpu":  # all memory of a CPU is alike
        pinned_at = min(max(options.contexts), options.pinned_context)
        cells += [(pinned_at, "auto", where) for where in ("device", "pinned")]
    model, source = load(checkpoint, options, say)
    bandwidth = read_bandwidth_gbps(options.device)
    say(f"reads {bandwidth:.0f} GB/s")
    record = {
        "device": torch.cuda.get_device_name(options.device) if options.device != "cpu" else "cpu",
        "torch": torch.__version__,
        "commit": options.commit,
        "table_rows": config.ngram_hash.rows,
        "bandwidth_gbps": bandwidth,
    }
    results: list[Measured] = []
    print(HEADER, flush=True)
    for context, kv, table in cells:
        if table == "pinned":
            try:
                model, facts = with_pinned_table(model, checkpoint, source, options, say)
            except RuntimeError as error:  # no room to pin: the other cells still count
                results.append(
                    Measured(context, kv, table, options.spec_tokens, failed=f"pinning: {str(error).splitlines()[0]}")
                )
                print(results[-1].line(), flush=True)
                continue
            record |= facts
        results.append(measure(checkpoint, model, options, context, kv, table, bandwidth))
        print(results[-1].line(), flush=True)
        say(f"{context} {kv} {table} done")
        line = json.dumps(record | {"cells": [asdict(r) | {"kept": r.kept} for r in results]}, separators=(",", ":"))
        if options.json is not None:
            options.json.write_text(line + "\n")
    if options.json is None:
        print(line)
    return int(not all(r.kept for r in results))


def parse() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=lambda s: [int(v) for v in s.split(",")], default=[700, 8192, 65536, 262144])
    parser.add_argument("--kv", choices=("auto", "fp8"), action="append", help="keys and values; both without it")
    parser.add_argument("--yarn", type=float, default=1.0, help="factor of YaRN, which the limit of positions has too")
    parser.add_argument("--spec-tokens", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--config", type=Path, default=FULL)
    parser.add_argument("--table-fraction", type=float, default=0.25)
    parser.add_argument("--no-pinned", dest="pinned", action="store_false")
    parser.add_argument("--pinned-context", type=int, default=PINNED_CONTEXT)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit-s", type=int, default=420, help="give up with a traceback after this long")
    return parser.parse_args()


def yarn_config(path: Path, factor: float) -> ModelConfig:
    """The config at a path, its rotary embedding and its limit of positions scaled by YaRN's factor."""
    plain = ModelConfig.read(path)
    if factor == 1:
        return plain
    raw = json.loads(path.read_text())
    rope = raw.get("text_config", raw)["rope_parameters"]
    limit = plain.max_position_embeddings
    scaled = {**rope, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": limit}
    return ModelConfig.read(path, {"rope_parameters": scaled, "max_position_embeddings": int(limit * factor)})


def plan_of(options: argparse.Namespace, kv: str, table: str) -> Plan:
    """What bench step would measure, for one sequence."""
    k = options.spec_tokens
    return Plan("a", (1,), (k,), tuple(options.contexts), 3, options.steps, options.device, 0, kv, table, False, False)


def cell_config(options: argparse.Namespace, context: int, kv: str, table: str, model: ModelConfig) -> EngineConfig:
    """The engine of a cell; at the model's own limit, the context ends there in place of going on behind the middle."""
    config = _config(plan_of(options, kv, table), 1, options.spec_tokens, context)
    return replace(config, max_model_len=min(config.max_model_len, model.max_position_embeddings))


def reached(options: argparse.Namespace, context: int, model: ModelConfig) -> int:
    """The context in the middle of the timed steps such that the last one stays within the model's limit."""
    unlimited = _config(plan_of(options, "auto", "device"), 1, options.spec_tokens, context).max_model_len
    return context - max(0, unlimited - model.max_position_embeddings)


def load(
    checkpoint: Checkpoint, options: argparse.Namespace, say: Callable[[str], None]
) -> tuple[Model, RandomTensors]:
    """Draw the model once, with positions for the longest cell."""
    longest = max(cell_config(options, c, "auto", "device", checkpoint.config).positions for c in options.contexts)
    begin = time.perf_counter()
    source = RandomTensors(checkpoint.config, torch.device(options.device))
    model = load_model(
        checkpoint,
        longest,
        options.device,
        drafter=options.spec_tokens > 0,
        decode_rows=options.spec_tokens + 1,
        source=source,
    )
    if options.device != "cpu":
        torch.cuda.synchronize(options.device)
        peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        say(f"drawn in {time.perf_counter() - begin:.1f} s; {kept / GIB:.2f} GiB kept, {peak / GIB:.2f} at most")
    return model, source


def with_pinned_table(
    model: Model, checkpoint: Checkpoint, source: RandomTensors, options: argparse.Namespace, say: Callable[[str], None]
) -> tuple[Model, dict[str, float]]:
    """The same model whose n-gram table lies in pinned host memory, as the loader puts it there."""
    before, begin = resident_bytes(), time.perf_counter()
    loader = _Loader(checkpoint, options.device, source, 1, "cpu")
    layers = list(model.layers)
    at = checkpoint.config.ple_layer
    ngram = layers[at].ngram
    if ngram is None:
        raise RuntimeError("the model has no n-gram layer")
    layers[at] = replace(layers[at], ngram=replace(ngram, shards=loader._table(_table_prefix(at))))
    table_bytes = sum(w.num_bytes for name, w in checkpoint.weights.items() if ".ngram_embedding.shard_" in name)
    facts = {
        "pinned_s": time.perf_counter() - begin,
        "pinned_table_gib": table_bytes / GIB,
        "pinned_resident_gib": (resident_bytes() - before) / GIB,
    }
    say(
        f"table of {table_bytes / GIB:.2f} GiB pinned in {facts['pinned_s']:.1f} s; the process grew by "
        f"{facts['pinned_resident_gib']:.2f} GiB"
    )
    return replace(model, layers=tuple(layers)), facts


def _table_prefix(layer: int) -> str:
    return f"layers.{layer}.ple.ple_embedding.ngram_embedding"


def resident_bytes() -> int:
    """What this process holds of the host's memory; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def plan_for(checkpoint: Checkpoint, config: EngineConfig, device_bytes: int) -> MemoryPlan:
    """The plan that the engine makes, on an empty device."""
    placement = replace(placement_of(config), expert_workspace_bytes=EXPERT_WORKSPACE_BYTES)
    host = 1 << 62
    if config.ngram_table != "pinned":  # a pinned table is there already
        host = host_memory().get("MemAvailable", host)
    return plan_memory(checkpoint.config, checkpoint.weights, config, discrete_capacity(device_bytes, host), placement)


def measure(
    checkpoint: Checkpoint,
    model: Model,
    options: argparse.Namespace,
    context: int,
    kv: str,
    table: str,
    bandwidth_gbps: float,
) -> Measured:
    """Run one cell under its plan."""
    config = cell_config(options, context, kv, table, checkpoint.config)
    on_gpu, k = options.device != "cpu", options.spec_tokens
    base = Measured(context, "bf16" if kv == "auto" else kv, table, k)
    limit, outside = 0, 0
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        whole = torch.cuda.mem_get_info(options.device)[1]
        plan = plan_for(checkpoint, config, whole)
        if (refusal := plan.refusal()) is not None:
            return replace(base, failed=refusal)
        needed = 2 * (model.cos.shape[0] - config.positions) * model.cos.shape[1] * model.cos.element_size()
        limit = plan.total("device") + needed
        outside = outside_bytes(options.device)
        # the driver loads kernels and graphs later, for which the plan has its reserve
        driver = max(outside, plan.capacity.device_reserve)
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limit - driver) / whole), index_of(options.device))
        torch.cuda.reset_peak_memory_stats(options.device)
    try:
        times = run(checkpoint, model, options, config, context, kv, table)
    except (RuntimeError, UserError) as error:  # out of memory is one
        return replace(base, planned=limit / GIB, failed=str(error).splitlines()[0])
    finally:
        gc.collect()
        if on_gpu:
            torch.cuda.set_per_process_memory_fraction(1.0, index_of(options.device))
    lengths = [b - a for a, b in pairwise(times.marks)]
    middle = reached(options, context, checkpoint.config)
    step = checkpoint_step_bytes(checkpoint.config, checkpoint.weights, 1, k, middle)
    # the warm-up steps before the first mark are as long as the timed ones
    prompt_s = max(1e-9, times.marks[0] - times.begin - (WARM_UP_STEPS - 1) * statistics.median(lengths))
    return replace(
        base,
        step_ms=(times.marks[-1] - times.marks[0]) / len(lengths) * 1e3,
        median_ms=statistics.median(lengths) * 1e3,
        floor_ms=Floor(step, bandwidth_gbps).step_us / 1e3,
        prompt_s=prompt_s,
        prefill_tokens_per_s=times.prompt / prompt_s,
        planned=limit / GIB,
        held=(torch.cuda.max_memory_reserved(options.device) + max(outside, times.outside)) / GIB if on_gpu else 0.0,
        allocated=torch.cuda.max_memory_allocated(options.device) / GIB if on_gpu else 0.0,
    )


def index_of(device: str) -> int:
    """Of a CUDA device; some of torch's functions take no name without one."""
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def outside_bytes(device: str) -> int:
    """What the driver, loaded kernels, graphs and other processes hold of the device."""
    if device == "cpu":
        return 0
    free, whole = torch.cuda.mem_get_info(device)
    return whole - free - torch.cuda.memory_reserved(device)


@dataclass(frozen=True)
class Times:
    """When the engine was given its prompt of so many tokens, and when the ids of each timed step arrived.

    outside  bytes of the device that torch's allocator does not know, at the end
    """

    begin: float
    prompt: int
    marks: list[float]
    outside: int


def run(
    checkpoint: Checkpoint,
    model: Model,
    options: argparse.Namespace,
    config: EngineConfig,
    context: int,
    kv: str,
    table: str,
) -> Times:
    """The engine lives and dies in here."""
    plan, k = plan_of(options, kv, table), options.spec_tokens
    engine = Engine(checkpoint, config, model=model, forced_accept=None if k == 0 else min(2, k))
    middle = reached(options, context, checkpoint.config)
    begin = time.perf_counter()
    marks = list(_steps(engine, plan, 1, k, middle, None if k == 0 else min(2, k)))
    return Times(begin, _prompt_tokens(plan, k, middle), marks, outside_bytes(options.device))


if __name__ == "__main__":
    sys.exit(main())
