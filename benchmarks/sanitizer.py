"""compute-sanitizer over the decode operators and whole eager steps: a verdict for each tool and piece of work.

    PYTHONPATH=src python3 -m benchmarks.sanitizer [--tools memcheck,racecheck,synccheck] [--cases NAME]
                                                    [--logs DIR] [--json FILE]

Work: every operator of `kernels/` at small odd shapes, CUDA and Triton kernels alike, a group of them a process; and a
few eager steps of the shipped model (bf16), and of random small models in formats a and c, with keys and values in fp8
and the sampler's every stage. Each is first run without a tool, which compiles its kernels and shows its own faults.
memcheck runs with torch's caching allocator off and padding around every allocation, so a stray access hits nobody's
memory. racecheck looks at shared memory only, torch's own kernels apart, and may not know what a kernel does with
asynchronous copies: its hazards are listed and have to be read. Two rules of CUDA 13.0's, as its reports show them: a
lane's arrival at an mbarrier counts for that lane alone, not for those it met in __syncwarp before; and a warp that has
waited at named barriers no oftener than another does not see what that one stored before it arrived. Clean is what has
no error of memcheck or synccheck, and no hazard that racecheck calls an error.
"""

import argparse
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import stepfloor
from stepfloor.config import EngineConfig, ModelConfig
from stepfloor.engine import Engine
from stepfloor.kernels.accept_drafts import accept_drafts, accept_drafts_inputs
from stepfloor.kernels.begin_rows import begin_rows, begin_rows_inputs
from stepfloor.kernels.commit_rows import commit_rows, commit_rows_inputs
from stepfloor.kernels.count_tokens import count_tokens, count_tokens_inputs
from stepfloor.kernels.draw_tokens import draw_tokens, draw_tokens_inputs
from stepfloor.kernels.embed import embed, embed_inputs
from stepfloor.kernels.gdn_decode import gdn_decode, gdn_decode_inputs
from stepfloor.kernels.gdn_prefill import gdn_prefill, gdn_prefill_inputs
from stepfloor.kernels.hc_down import hc_down, hc_down_inputs, hc_down_repack
from stepfloor.kernels.hc_mix import hc_mix, hc_mix_inputs, hc_mix_repack
from stepfloor.kernels.linear import linear, linear_inputs, linear_repack
from stepfloor.kernels.match_drafts import match_drafts, match_drafts_inputs
from stepfloor.kernels.moe_down import moe_down, moe_down_inputs, moe_down_repack
from stepfloor.kernels.moe_gate_up import moe_gate_up, moe_gate_up_inputs, moe_gate_up_repack
from stepfloor.kernels.moe_route import moe_route, moe_route_inputs
from stepfloor.kernels.mtp_fuse import mtp_fuse, mtp_fuse_inputs
from stepfloor.kernels.mtp_norm import mtp_norm, mtp_norm_inputs
from stepfloor.kernels.ngram_gather import ngram_gather, ngram_gather_inputs, ngram_gather_table
from stepfloor.kernels.ngram_rows import ngram_rows, ngram_rows_inputs
from stepfloor.kernels.ple_mix import ple_mix, ple_mix_inputs
from stepfloor.kernels.process_logits import process_logits, process_logits_inputs
from stepfloor.kernels.qsa_attend import qsa_attend, qsa_attend_inputs
from stepfloor.kernels.qsa_prepare import SparseShape, qsa_prepare, qsa_prepare_inputs
from stepfloor.kernels.qsa_select import qsa_select, qsa_select_inputs
from stepfloor.kernels.stream_read import stream_read, stream_read_inputs
from stepfloor.kernels.take_rows import take_rows, take_rows_inputs
from stepfloor.model.load import load_model
from stepfloor.model.random import RandomTensors
from stepfloor.request import Request, SamplingParams
from stepfloor.tools.bench.step import MIXES, random_checkpoint
from stepfloor.weights.checkpoint import open_checkpoint

SHIPPED = Path(stepfloor.__file__).parent / "shipped"
BF16 = torch.bfloat16
VOCABULARY = 1031  # no multiple of anything
ROWS = (1, 5, 19)
Case = tuple[str, Callable[[], Any]]


# ---------------------------------------------------------------------- what is run


def dense(device: str) -> Iterator[Case]:
    """Streamed products and hyper-connections, every format, the kernels of several row counts."""
    on_gpu = device != "cpu"
    for name in ("bf16", "fp8_channel", "fp8_block", "mxfp8", "nvfp4"):
        for n, k in ((251, 64), (385, 256), (5301, 640), (1100, 1280), (336, 8192)):
            for rows in (*ROWS, 37):
                inputs = linear_inputs(rows, n, k, name, BF16, device)
                weight = inputs["weights"][0]  # type: ignore[index]
                inputs["weights"] = (linear_repack(weight, device, max_rows=rows) if on_gpu else weight,)
                yield f"linear {name} {n}x{k} {rows}", lambda i=inputs: linear(**i)  # type: ignore[arg-type]
    for name in ("bf16", "fp8_channel"):
        for rows in ROWS:
            for write in (True, False):
                # the CUDA kernel takes streams of a multiple of 256
                down = hc_down_inputs(rows, 256, 20, name, BF16, device, write)
                if on_gpu:
                    down["down"] = hc_down_repack(down["down"], 20, 4, device, max_rows=rows)  # type: ignore[arg-type]
                yield f"hc_down {name} {rows} {write}", lambda i=down: hc_down(**i)  # type: ignore[arg-type]
            mix = hc_mix_inputs(rows, 192, 64, name, BF16, device)
            if on_gpu:
                mix["up"] = hc_mix_repack(mix["up"], 4, device, max_rows=rows)  # type: ignore[arg-type]
            yield f"hc_mix {name} {rows}", lambda i=mix: hc_mix(**i)  # type: ignore[arg-type]


def experts(device: str) -> Iterator[Case]:
    """Routed experts: tiled NVFP4 and grouped ones."""
    for name in ("nvfp4", "bf16", "fp8_block"):
        for rows in (*ROWS, 37):
            yield from expert_pair(name, rows, (256, 64), (256, 64), device)
    for rows in ROWS:
        route = moe_route_inputs(rows, 9, 80, 3, BF16, device)
        yield f"moe_route {rows}", lambda i=route: moe_route(**i)  # type: ignore[arg-type]


def turns(device: str) -> Iterator[Case]:
    """Routed experts whose blocks use every buffer again: a ring that is refilled, sums that are overwritten.

    A block of `experts` has hardly one tile. These are about ten for each of an H200's 264 blocks.
    """
    for name, rows, width in (("nvfp4", 5, 2560), ("nvfp4", 37, 768), ("fp8_block", 5, 2560), ("fp8_block", 37, 384)):
        yield from expert_pair(name, rows, (64, width), (5120, 64), device)


def expert_pair(name: str, rows: int, gate_up: tuple[int, int], down: tuple[int, int], device: str) -> Iterator[Case]:
    """Both products of 9 experts, 3 a row; the first one's columns and channels, the second one's rows and columns."""
    first: dict[str, Any] = moe_gate_up_inputs(rows, *gate_up, 9, 3, name, BF16, device)
    second: dict[str, Any] = moe_down_inputs(rows, *down, 80, 9, 3, name, BF16, device)
    if device != "cpu":
        first["gate_up"] = moe_gate_up_repack(first["gate_up"], 3, device, max_rows=rows)
        second["down"], second["shared_down"] = moe_down_repack(
            second["down"],
            second["shared_down"],
            3,
            device,
            max_rows=rows,
        )
    yield f"moe_gate_up {name} {rows}", lambda: moe_gate_up(**first)
    yield f"moe_down {name} {rows}", lambda: moe_down(**second)


def attention(device: str) -> Iterator[Case]:
    """Delta net and sparse attention, in decode steps and prompts."""
    for sequences, rows in ((1, 1), (1, 4), (3, 3), (9, 2)):
        for settled in (False, True):
            inputs = gdn_decode_inputs(sequences, rows, 2, 4, 64, 64, BF16, device)
            yield (
                f"gdn_decode {sequences} {rows} {settled}",
                lambda i=inputs, s=settled: gdn_decode(**i, settled=s),  # type: ignore[arg-type]
            )
    odd = gdn_decode_inputs(2, 3, 1, 2, 48, 40, BF16, device)
    yield "gdn_decode odd", lambda: gdn_decode(**odd)  # type: ignore[arg-type]
    for rows in (5, 70, 140):
        prompt = gdn_prefill_inputs(rows, 2, 4, 64, 64, BF16, device)
        yield f"gdn_prefill {rows}", lambda i=prompt: gdn_prefill(**i)  # type: ignore[arg-type]
    shape = SparseShape(4, 2, 64, 2, 32, 4, 8)
    for sequences, rows, context in ((1, 1, 0), (3, 3, 37), (2, 4, 150), (1, 21, 90)):
        name = f"{sequences} {rows} {context}"
        prepare: dict[str, Any] = qsa_prepare_inputs(sequences, rows, context, shape, BF16, device)
        for settled in (False, True):
            yield (
                f"qsa_prepare {name} {settled}",
                lambda i=prepare, s=settled: qsa_prepare(**i, settled=s),
            )
        select = qsa_select_inputs(sequences, rows, context, 2, 32, 4, 8, BF16, device)
        yield f"qsa_select {name}", lambda i=select: qsa_select(**i)  # type: ignore[arg-type]
        attend = qsa_attend_inputs(sequences, rows, context, 4, 2, 64, 4, 8, BF16, device)
        yield f"qsa_attend {name}", lambda i=attend: qsa_attend(**i)  # type: ignore[arg-type]


def edges(device: str) -> Iterator[Case]:
    """The ends of the network, the n-gram layer, sampling, and the ends of a step."""
    on_gpu = device != "cpu"
    for rows in ROWS:
        table = embed_inputs(rows, VOCABULARY, 264, BF16, device)
        yield f"embed {rows}", lambda i=table: embed(**i)  # type: ignore[arg-type]
        norm = mtp_norm_inputs(rows, 264, VOCABULARY, BF16, device)
        yield f"mtp_norm {rows}", lambda i=norm: mtp_norm(**i)  # type: ignore[arg-type]
        fuse = mtp_fuse_inputs(rows, 264, BF16, device)
        yield f"mtp_fuse {rows}", lambda i=fuse: mtp_fuse(**i)
        for name in ("bf16", "fp8_tensor", "nvfp4"):
            gather = ngram_gather_inputs(rows, 6, 32, 53, 3, name, BF16, device)
            if on_gpu:
                gather["shards"] = ngram_gather_table(gather["shards"], device)  # type: ignore[arg-type]
            yield f"ngram_gather {name} {rows}", lambda i=gather: ngram_gather(**i)  # type: ignore[arg-type]
        logits = process_logits_inputs(rows, VOCABULARY, BF16, device)
        yield f"process_logits {rows}", lambda i=logits: process_logits(**i)  # type: ignore[arg-type]
        draw = draw_tokens_inputs(rows, VOCABULARY, device)
        yield f"draw_tokens {rows}", lambda i=draw: draw_tokens(**i)  # type: ignore[arg-type]
    for sequences, rows in ((1, 1), (3, 4), (5, 2)):
        hashed = ngram_rows_inputs(sequences, rows, VOCABULARY, 6, device)
        yield f"ngram_rows {sequences} {rows}", lambda i=hashed: ngram_rows(**i)  # type: ignore[arg-type]
        mixed = ple_mix_inputs(sequences, rows, 264, BF16, device)
        yield f"ple_mix {sequences} {rows}", lambda i=mixed: ple_mix(**i)  # type: ignore[arg-type]
        counted = count_tokens_inputs(sequences, rows, VOCABULARY, device)
        yield f"count_tokens {sequences} {rows}", lambda i=counted: count_tokens(**i)
        matched = match_drafts_inputs(sequences, rows, device)
        yield f"match_drafts {sequences} {rows}", lambda i=matched: match_drafts(**i)
        judged = accept_drafts_inputs(sequences, rows, VOCABULARY, device)
        yield f"accept_drafts {sequences} {rows}", lambda i=judged: accept_drafts(**i)  # type: ignore[arg-type]
        begun = begin_rows_inputs(sequences, rows, 2, device)
        taken = take_rows_inputs(sequences, rows, 264, BF16, device)
        yield f"take_rows {sequences} {rows}", lambda i=taken: take_rows(**i)
        yield f"begin_rows {sequences} {rows}", lambda i=begun: begin_rows(**i)  # type: ignore[arg-type]
        ended = commit_rows_inputs(sequences, rows, 2, device)
        yield f"commit_rows {sequences} {rows}", lambda i=ended: commit_rows(**i)  # type: ignore[arg-type]
    read = stream_read_inputs(100_003, device)
    yield "stream_read", lambda: stream_read(**read)


def step_shipped(device: str) -> Iterator[Case]:
    """Eager steps of the shipped model, bf16."""
    yield "step of the shipped model", lambda: _steps(device, None, "auto")


def step_a(device: str) -> Iterator[Case]:
    """Eager steps of a random model in format a."""
    yield "step in format a", lambda: _steps(device, "a", "auto")


def step_c(device: str) -> Iterator[Case]:
    """Eager steps of a random model in format c, keys and values in fp8."""
    yield "step in format c", lambda: _steps(device, "c", "fp8")


WORK: dict[str, Callable[[str], Iterator[Case]]] = {
    "dense": dense,
    "experts": experts,
    "turns": turns,
    "attention": attention,
    "edges": edges,
    "step": step_shipped,
    "step-a": step_a,
    "step-c": step_c,
}


def _steps(device: str, mix: str | None, kv: str) -> int:
    """Serve three requests for a few steps, one of them behind the others; how many tokens came."""
    config = EngineConfig(
        spec_tokens=3,
        max_num_seqs=2,
        max_model_len=256,
        max_num_batched_tokens=96,
        kv_cache_dtype="fp8" if kv == "fp8" else "auto",
        enforce_eager=True,
        device=device,
    )
    if mix is None:
        engine = Engine(open_checkpoint(SHIPPED), config)
    else:
        # sizes as the kernels of a large model want them
        small = replace(
            ModelConfig.read(SHIPPED / "config.json"), vocab_size=512, hc_lowrank=64, moe_intermediate_size=128
        )
        checkpoint = random_checkpoint(small, MIXES[mix])
        source = RandomTensors(small, torch.device(device))
        engine = Engine(checkpoint, config, model=load_model(checkpoint, 280, device, decode_rows=8, source=source))
    make = torch.Generator().manual_seed(5)
    every = {
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": ((7, 1.0),),
    }
    settings: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.0, **every})
    for i, (length, sampling) in enumerate(zip((3, 130, 70), settings, strict=True)):
        ids = torch.randint(1, 500, (length,), generator=make).tolist()
        engine.submit(Request(str(i), tuple(ids), SamplingParams(**sampling, seed=i), 5))
    tokens = 0
    for piece in engine.run():
        if piece.finish_reason == "error":
            raise RuntimeError(f"request {piece.request_id}: {piece.error}")
        tokens += len(piece.token_ids)
    return tokens


def run_work(name: str, device: str, cases: str = "") -> int:
    """Run one piece of work here, or those of its cases whose name begins so, naming each before it begins."""
    with torch.inference_mode():
        for case, call in WORK[name](device):
            if not case.startswith(cases):
                continue
            print(f"case: {case}", flush=True)
            call()
            if device != "cpu":
                torch.cuda.synchronize(device)
    print("done", flush=True)
    return 0


# ---------------------------------------------------------------------- what the tools say


@dataclass(frozen=True)
class Verdict:
    """One tool on one piece of work.

    verdict  clean, the number of errors, or why there is none; first  its first finding; cases  that began
    """

    tool: str
    work: str
    verdict: str
    clean: bool
    seconds: float
    cases: int
    first: str = ""

    def line(self) -> str:
        """One row of the table."""
        text = f"{self.tool:>10} {self.work:>10} {self.cases:4} cases {self.seconds:7.1f} s  {self.verdict}"
        return text + (f"\n{self.first}" if self.first else "")


ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
FINDING = re.compile(
    r"^=========\s+(Invalid|Error|Warning|Barrier|Divergent|Misaligned|Address|Race|Uninit|Unsupp|Internal)", re.M
)


def read_verdict(tool: str, work: str, output: str, returned: int, seconds: float, limit_s: float) -> Verdict:
    """What a tool's output means; returned is the exit status, -9 where it was stopped at its limit."""
    cases = output.count("case: ")
    first = ""
    if (found := FINDING.search(output)) is not None:
        case = output.rfind("case: ", 0, found.start())
        named = output[case:].splitlines()[0] if case >= 0 else "before the first case"
        first = f"    in {named}\n" + "\n".join(f"    {line}" for line in output[found.start() :].splitlines()[:7])
    tail = " | ".join(output.strip().splitlines()[-3:])

    def verdict(text: str, clean: bool = False) -> Verdict:
        return Verdict(tool, work, text, clean, seconds, cases, first)

    if returned == -signal.SIGKILL:
        return verdict(f"stopped at its limit of {limit_s:.0f} s, in its case {cases}")
    if tool == "racecheck" and (race := HAZARDS.search(output)) is not None:
        _, errors, warnings = (int(value) for value in race.groups())
        said = f"{errors} errors, {warnings} warnings" if errors or warnings else "clean"
        return verdict(
            said if "\ndone" in output else f"{said}, but the work failed: {tail}", not errors and "\ndone" in output
        )
    if (counted := ERRORS.search(output)) is not None:
        errors = int(counted.group(1))
        done = "\ndone" in output
        text = "clean" if not errors else f"{errors} errors"
        return verdict(text if done else f"{text}, but the work failed: {tail}", not errors and done)
    if tool == "none":
        return verdict("ran" if not returned else f"failed: {tail}", not returned)
    return verdict(f"no verdict: exit status {returned}: {tail}")


def find_sanitizer(given: Path | None) -> Path | None:
    """Where compute-sanitizer is, if it is anywhere it is usually put."""
    if given is not None:
        return given
    if (on_path := shutil.which("compute-sanitizer")) is not None:
        return Path(on_path)
    found = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    return found[-1] if found else None


def tool_command(sanitizer: Path, tool: str, known: str) -> list[str]:
    """The tool's command line; known is what --help prints, since options differ between versions."""
    command = ["/usr/bin/env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", str(sanitizer), "--tool", tool]
    wanted = {"--report-api-errors": "no", "--error-exitcode": "77"}
    if tool == "memcheck":
        wanted |= {"--padding": "64"}
    if tool == "racecheck":
        # shared memory of torch's own kernels is torch's business, and takes most of the tool's time
        wanted |= {"--kernel-name-exclude": "kns=at6native"}
    for option, value in wanted.items():
        if option in known:
            command += [option, value]
    return command


def run_tool(command: list[str], tool: str, work: str, limit_s: float, logs: Path) -> Verdict:
    """Run one process to its end or its limit, and keep what it printed."""
    begin = time.perf_counter()
    # a session of its own: the tool's child ends with it
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    returned: int
    try:
        output, _ = process.communicate(timeout=limit_s)
        returned = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        returned = -signal.SIGKILL
    logs.mkdir(parents=True, exist_ok=True)
    (logs / f"{tool}-{work}.txt").write_text(output)
    return read_verdict(tool, work, output, returned, time.perf_counter() - begin, limit_s)


def main() -> int:
    """1 if a tool found something or could not say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=lambda s: s.split(","), default=["memcheck", "racecheck", "synccheck"])
    parser.add_argument("--work", type=lambda s: s.split(","), default=list(WORK))
    parser.add_argument("--sanitizer", type=Path, help="where compute-sanitizer is")
    parser.add_argument("--jobs", type=int, default=10, help="processes at once")
    parser.add_argument("--each-s", type=float, default=140.0, help="limit of one process")
    parser.add_argument("--limit-s", type=float, default=480.0, help="begin nothing that could end later")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "stepfloor-sanitizer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--cases", default="", help="only cases whose name begins so, as `moe_gate_up fp8_block 37`")
    parser.add_argument("--run", choices=WORK, help="run one piece of work here, without a tool")
    options = parser.parse_args()
    if options.run is not None:
        faulthandler.enable()
        return run_work(options.run, options.device, options.cases)
    begin = time.perf_counter()
    sanitizer = find_sanitizer(options.sanitizer)
    verdicts: list[Verdict] = []

    def left() -> float:
        return options.limit_s - (time.perf_counter() - begin)

    def one(tool: str, work: str, prefix: list[str]) -> Verdict:
        if (limit := min(options.each_s, left())) < 10:
            verdict = Verdict(tool, work, "not run: out of time", False, 0.0, 0)
        else:
            command = [*prefix, sys.executable, "-m", "benchmarks.sanitizer", "--run", work]
            command += ["--device", options.device, "--cases", options.cases]
            verdict = run_tool(command, tool, work, limit, options.logs)
        print(verdict.line(), flush=True)
        return verdict

    def every(tasks: list[tuple[str, str, list[str]]]) -> None:
        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts.extend(pool.map(lambda task: one(*task), tasks))

    every([("none", work, []) for work in options.work])
    works = [v.work for v in verdicts if v.clean]
    if sanitizer is None:
        print("no compute-sanitizer on PATH or under /usr/local/cuda*/bin; pass --sanitizer PATH")
    else:
        known = subprocess.run([str(sanitizer), "--help"], capture_output=True, text=True, check=False).stdout
        every([(tool, work, tool_command(sanitizer, tool, known)) for tool in options.tools for work in works])
    for tool in ("none", *options.tools):
        own = [v for v in verdicts if v.tool == tool]
        bad = [v.work for v in own if not v.clean]
        said = "not run" if not own else "clean" if not bad else f"not clean or not known: {', '.join(bad)}"
        print(f"verdict of {tool}: {said}")
    line = json.dumps(
        {
            "device": torch.cuda.get_device_name(options.device) if options.device != "cpu" else "cpu",
            "torch": torch.__version__,
            "commit": options.commit,
            "sanitizer": None if sanitizer is None else str(sanitizer),
            "verdicts": [asdict(v) for v in verdicts],
        },
        separators=(",", ":"),
    )
    if options.json is not None:
        options.json.write_text(line + "\n")
    if options.json is None:
        print(line)
    return int(sanitizer is None or not all(v.clean for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
