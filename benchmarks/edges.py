"""The operators at the network's edges on one GPU: right first, then timed beside the bytes they must move.

    PYTHONPATH=src:. python3 -m benchmarks.edges [--only embed,ple_mix] [--json FILE] [--commit ID]

1. Every part is checked in a process of its own at the released model's sizes: against its reference, NaN in memory
   that torch hands out, a row's bits alone and beside others, graph replay against the eager run. What is wrong,
   crashes or hangs is named and gets no times.
2. CUDA-graph replays of calls in a row, rounds in alternating order, medians. Decode inputs are small and stay in the
   L2; table rows, and matrices of `product`, are others in every call. Floors are at --bandwidth; rows in pinned memory
   have a bus in front of them, so their share of it says little.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import (
    BANDWIDTH,
    capture,
    describe,
    give_up_after,
    gpu,
    load_and_capture,
    medians_us,
    run_apart,
    say,
    stopwatch,
    write_json,
)
from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels import (
    embed,
    hc_down,
    hc_mix,
    mtp_fuse,
    mtp_norm,
    ngram_gather,
    ngram_rows,
    ple_mix,
    qsa_prepare,
    take_rows,
)
from stepfloor.kernels._product import packed_product
from stepfloor.kernels._torch import rms_norm, sigmoid, silu
from stepfloor.roofline import bytes as roofline

D, STREAMS, RANK, EPS = 2560, 4, 320, 1e-6
SPARSE = qsa_prepare.SparseShape(24, 2, 256, 4, 128, 4, 512)
CONTEXT = 702  # the first of four rows completes no block, the second does, with two keys from the ring
HEADS, WIDTH, SHARD_ROWS = 16, 160, 2_500_012
DECODE, PREFILL = (1, 4, 16, 64), 8192
ROWS = (*DECODE, PREFILL)
PRODUCTS = {"down": (324, 10240), "up": (10240, 320), "out": (2560, 6144), "in": (16480, 2560)}
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Job:
    """One operator at one number of rows.

    run     the i-th of several calls; moved  bytes of one
    wrong   what is wrong with it
    """

    run: Callable[[int], Any]
    moved: int
    wrong: Callable[[], list[str]]


Maker = Callable[[int], Job]


def main() -> int:
    """Check and time; 1 if a part fails."""
    options = parse()
    if options.check is not None:
        return check_parts(options.check)
    give_up_after(options.limit_s)
    device = gpu()
    stamp = stopwatch()
    say(describe(device, options.commit))
    names = [name for name in PARTS if not options.only or name.split(",")[0] in options.only]
    passed = check_all(names)
    stamp("checks done; us a call, share of the floor")
    table: dict[str, dict[str, dict[str, float]]] = {}
    broken: list[str] = []
    for name in passed:
        try:
            table[name] = time_part(name, options)
        except RuntimeError as error:
            broken.append(name)
            say(f"{name:28} NOT TIMED: {error}")
        torch.cuda.empty_cache()
    stamp("timed")
    failed = [name for name in names if name not in passed] + broken
    line = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "failed": failed, "us": table}
    write_json(options.json, line)
    say(json.dumps(line, separators=(",", ":")))
    return int(bool(failed))


def parse() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), help="operators to check and time")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="what was checked out, where git cannot say")
    parser.add_argument("--limit-s", type=int, default=120, help="give up with a traceback after this long")
    parser.add_argument("--check", nargs="+", metavar="PART", help="check these parts only, here")
    return parser.parse_args()


# ---------------------------------------------------------------------- is it right


def check_all(names: list[str]) -> list[str]:
    """The parts that pass; those of one operator, or one product, share a process."""
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(name.rpartition(",")[0] if name.startswith("product") else name.split(",")[0], []).append(
            name
        )

    passed: list[str] = []
    jobs = {family: ["--check", *names] for family, names in families.items()}
    for family, _, text in run_apart("benchmarks.edges", jobs, 60, at_once=6):
        fine = [name for name in families[family] if f"ok     {name}" in text.splitlines()]
        passed += fine
        for name in families[family]:
            say(f"{'ok    ' if name in fine else 'FAILED'} {name}")
        if len(fine) < len(families[family]):
            say("\n".join(f"       {line}" for line in text.splitlines() if not line.startswith("ok ")))
    return passed


def check_parts(names: list[str]) -> int:
    """Name each part that is right for every number of rows; exit status 0 if all are."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    wrong = 0
    for name in names:
        try:
            found = faults(name)
        except RuntimeError as error:
            found = [f"CRASHED: {error}"]
        wrong += bool(found)
        say("\n".join(f"{name}, {text}" for text in found[:8]) if found else f"ok     {name}")
    return int(bool(wrong))


def faults(name: str) -> list[str]:
    """What is wrong with one part."""
    make, rows = PARTS[name]
    found: list[str] = []
    for count in rows:
        job = make(count)
        eager = outputs(job.run(0))
        found += [f"{count} rows: {text}" for text in job.wrong()]
        if name == "ple_mix":
            continue  # it goes on from where the run before left its history; tests replay it
        torch.cuda.synchronize()
        held: list[Any] = []
        graph = capture(lambda job=job, held=held: held.append(job.run(0)))
        captured = outputs(held[0])
        for t in captured:
            t.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        if not all(same(a, b) for a, b in zip(captured, eager, strict=True)):
            found.append(f"{count} rows: a replayed graph differs from the eager run")
    return found


def outputs(result: Any) -> list[Tensor]:
    """The tensors that an operator made."""
    return [result] if isinstance(result, Tensor) else list(result)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits; NaN equals nothing, so it shows."""
    return a.dtype == b.dtype and torch.equal(a, b)


def differences(ours: Any, wanted: Any, exact: bool = False, most: float = 0.05) -> list[str]:
    """In bf16 no more than a part of the values may differ, and none by more than four steps of its row's largest."""
    found: list[str] = []
    for index, (a, b) in enumerate(zip(outputs(ours), outputs(wanted), strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"result {index} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}")
        elif not a.numel() or same(a, b):
            continue
        elif exact:
            found.append(f"result {index}: {int((a != b).sum())} of {a.numel()} values differ")
        else:
            reach = b.float().abs().amax(-1, keepdim=True).clamp_min(1e-3)
            off = float(((a.float() - b.float()).abs() / reach).nan_to_num(math.inf).max())
            share = float((a != b).float().mean())
            if off > 4 * 2.0**-7 or share > most:
                found.append(f"result {index}: off by {off:.3g} of the row's largest, {share:.2%} differ")
    return found


def against(
    operator: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: dict[str, Any],
    per_row: tuple[str, ...],
    exact: bool = False,
    alone: bool = True,
    most: float = 0.05,
) -> list[str]:
    """Against the reference, and the last row by itself against the same row beside others."""
    ours = operator(**inputs)
    found = differences(ours, reference(**inputs), exact, most)
    if alone:
        last = operator(**inputs | {name: inputs[name][-1:] for name in per_row if inputs[name] is not None})
        for one, many in zip(outputs(last), outputs(ours), strict=True):
            if not same(one, many[-1:]):
                found.append("the last row has other bits alone")
    return found


# ---------------------------------------------------------------------- the parts


def embed_job(rows: int) -> Job:
    inputs: dict[str, Any] = embed.embed_inputs(rows, 248320, D, BF16, str(gpu()))
    wrong = partial(against, embed.embed, embed.embed_reference, inputs, ("tokens",), True)
    return Job(lambda _: embed.embed(**inputs), roofline.embed(rows, D, STREAMS), wrong)


def rows_job(rows: int) -> Job:
    shape = (1, rows) if rows == PREFILL else (rows, 1)
    inputs: dict[str, Any] = ngram_rows.ngram_rows_inputs(*shape, 248320, HEADS, str(gpu()))
    wrong = partial(
        against, ngram_rows.ngram_rows, ngram_rows.ngram_rows_reference, inputs, ("tokens", "history"), True
    )
    return Job(lambda _: ngram_rows.ngram_rows(**inputs), roofline.ngram_rows(rows, 3, HEADS), wrong)


def table_shards(name: str, count: int, pinned: bool) -> list[PackedWeight]:
    """Shards of the real height; no code is a NaN."""
    make = torch.Generator(gpu()).manual_seed(0)

    def codes(width: int) -> Tensor:
        data = torch.randint(0, 0x78, (SHARD_ROWS, width), generator=make, device=gpu(), dtype=torch.uint8)
        return data.cpu().pin_memory() if pinned else data

    def shard() -> PackedWeight:
        shape = (SHARD_ROWS, WIDTH)
        if name == "fp8_tensor":
            return PackedWeight(name, shape, codes(WIDTH).view(torch.float8_e4m3fn), torch.full((1,), 0.013).to(BF16))
        if name == "nvfp4":
            scale = codes(WIDTH // 16).view(torch.float8_e4m3fn)
            return PackedWeight(name, shape, codes(WIDTH // 2), scale, torch.tensor(1e-3))
        data = torch.empty(shape, dtype=BF16, device=gpu()).normal_(generator=make)
        return PackedWeight("bf16", shape, data.cpu().pin_memory() if pinned else data)

    return [shard() for _ in range(count)]


def gather_maker(name: str, pinned: bool) -> Maker:
    held: list[tuple[list[PackedWeight], ngram_gather.GatherTable]] = []

    def job(rows: int) -> Job:
        if not held:
            shards = table_shards(name, 2, pinned)
            held.append((shards, ngram_gather.ngram_gather_table(shards, str(gpu()))))
        shards, table = held[0]
        ids = torch.randint(0, table.rows, (20, rows, HEADS), device=gpu())

        def wrong() -> list[str]:
            """Few rows are compared: their reference indexes whole shards."""
            some = ids[0, : min(rows, 64)]
            owner, local = some // SHARD_ROWS, some % SHARD_ROWS
            wanted = torch.empty((*some.shape, WIDTH), dtype=BF16, device=gpu())
            for index, shard in enumerate(shards):
                mine = owner == index
                at = local[mine].to(shard.data.device)
                scale = shard.scale
                if name == "nvfp4" and scale is not None:
                    scale = scale.view(torch.uint8)[at].view(torch.float8_e4m3fn)
                data = shard.data.view(torch.uint8)[at].view(shard.data.dtype)
                part = replace(shard, shape=(at.shape[0], WIDTH), data=data, scale=scale)
                wanted[mine] = part.to(gpu()).dequantize().to(BF16)
            ours = ngram_gather.ngram_gather(ids[0], table, BF16)
            found = differences(ours[: some.shape[0]], wanted.flatten(1), True)
            if not same(ngram_gather.ngram_gather(ids[0, -1:], table, BF16), ours[-1:]):
                found.append("the last row has other bits alone")
            return found

        moved = roofline.ngram_gather(rows, HEADS, WIDTH, name)
        return Job(lambda i: ngram_gather.ngram_gather(ids[i % 20], table, BF16), moved, wrong)

    return job


def ple_job(rows: int) -> Job:
    """Up to 4 rows a sequence, as a step with three drafts has; a prompt chunk is one sequence."""
    each = rows if rows == PREFILL else min(rows, 4)
    count = rows // each
    inputs: dict[str, Any] = ple_mix.ple_mix_inputs(count, each, D, BF16, str(gpu()))
    inputs["conv_rows"] = inputs["conv_rows"][:, :13].contiguous()
    inputs["rejected"] = inputs["rejected"].clamp(max=min(each, 4))

    def fresh() -> dict[str, Any]:
        return inputs | {"conv_rows": inputs["conv_rows"].clone()}

    def wrong() -> list[str]:
        ours, theirs, last = fresh(), fresh(), fresh()
        output = ple_mix.ple_mix(**ours)
        found = differences(output, ple_mix.ple_mix_reference(**theirs))
        found += [f"history: {text}" for text in differences(ours["conv_rows"], theirs["conv_rows"])]
        last |= {name: inputs[name][-each:] for name in ("residual", "y", "y_weights")}
        last |= {name: inputs[name][-1:] for name in ("key_value", "slots", "rejected")}
        if not same(ple_mix.ple_mix(**last), output[-each:]):
            found.append("the last sequence has other bits alone")
        return found

    return Job(lambda _: ple_mix.ple_mix(**inputs), roofline.ple_mix(count, each, D, STREAMS, 4, 3), wrong)


def norm_job(rows: int) -> Job:
    inputs: dict[str, Any] = mtp_norm.mtp_norm_inputs(rows, D, 30000, BF16, str(gpu()))
    wrong = partial(against, mtp_norm.mtp_norm, mtp_norm.mtp_norm_reference, inputs, ("residual", "tokens"))
    return Job(lambda _: mtp_norm.mtp_norm(**inputs), roofline.mtp_norm(rows, D, STREAMS), wrong)


def fuse_job(rows: int) -> Job:
    inputs: dict[str, Any] = mtp_fuse.mtp_fuse_inputs(rows, D, BF16, str(gpu()))
    wrong = partial(against, mtp_fuse.mtp_fuse, mtp_fuse.mtp_fuse_reference, inputs, ("hidden", "token"), True)
    return Job(lambda _: mtp_fuse.mtp_fuse(**inputs), roofline.mtp_fuse(rows, D, STREAMS), wrong)


def take_job(rows: int) -> Job:
    """Up to 4 rows a sequence, one of which is taken."""
    each = min(rows, 4)
    inputs = take_rows.take_rows_inputs(rows // each, each, D, BF16, str(gpu()))
    wrong = partial(against, take_rows.take_rows, take_rows.take_rows_reference, inputs, ("rows",), True)
    return Job(lambda _: take_rows.take_rows(**inputs), roofline.take_rows(rows // each, D, STREAMS), wrong)


def prepare_maker(settled: bool) -> Maker:
    """Up to 4 rows a sequence; each call of a chain has a cache of its own, as each layer has."""

    def job(rows: int) -> Job:
        each = rows if rows == PREFILL else min(rows, 4)
        inputs: dict[str, Any] = qsa_prepare.qsa_prepare_inputs(rows // each, each, CONTEXT, SPARSE, BF16, str(gpu()))
        # as allocated for three drafts and more: not a row of the ring for each of a prompt
        ring = inputs["cache"].raw_keys[:, : SPARSE.ratio + 7].contiguous()
        inputs["cache"] = replace(inputs["cache"], raw_keys=ring)
        names = ("keys", "values", "block_keys", "raw_keys")

        def copy(cache: Any) -> Any:
            return replace(cache, **{name: getattr(cache, name).clone() for name in names})

        caches = [copy(inputs["cache"]) for _ in range(5 if rows == PREFILL else 20)]

        def run(i: int) -> tuple[Tensor, ...]:
            return qsa_prepare.qsa_prepare(**inputs | {"cache": caches[i % len(caches)]}, settled=settled)

        def wrong() -> list[str]:
            ours, theirs, last = (copy(inputs["cache"]) for _ in range(3))
            q, gate, index_q = qsa_prepare.qsa_prepare(**inputs | {"cache": ours}, settled=settled)
            wanted = qsa_prepare.qsa_prepare_reference(**inputs | {"cache": theirs})
            found = differences((q, gate, index_q), wanted)
            for name in names:
                kept = differences(getattr(ours, name), getattr(theirs, name))
                found += [f"{name}: {text}" for text in kept]
            one = {name: inputs[name][-1:] for name in ("projected", "slots", "first")} | {"cache": last}
            alone = qsa_prepare.qsa_prepare(**inputs | one, settled=settled)
            if not all(same(a, b[-1:]) for a, b in zip(alone, (q, gate, index_q), strict=True)):
                found.append("the last sequence has other bits alone")
            return found

        moved = roofline.qsa_prepare(
            rows, SPARSE.heads, SPARSE.kv_heads, SPARSE.head_dim, SPARSE.index_heads, SPARSE.index_dim, SPARSE.ratio
        )
        return Job(run, moved, wrong)

    return job


def most(name: str, rows: int) -> float:
    """The part of the values that may differ: any, where the library multiplies a quantized matrix in bf16."""
    return 1.0 if rows == PREFILL and name != "bf16" else 0.05


def down_maker(name: str) -> Maker:
    def job(rows: int) -> Job:
        inputs: dict[str, Any] = hc_down.hc_down_inputs(rows, D, RANK, name, BF16, str(gpu()))
        per_row = ("residual", "y", "y_weights")
        wrong = partial(
            against,
            hc_down.hc_down,
            hc_down.hc_down_reference,
            inputs,
            per_row,
            alone=rows <= 80,
            most=most(name, rows),
        )
        return Job(lambda _: hc_down.hc_down(**inputs), roofline.hc_down(rows, D, STREAMS, RANK, name), wrong)

    return job


def mix_maker(name: str) -> Maker:
    def job(rows: int) -> Job:
        inputs: dict[str, Any] = hc_mix.hc_mix_inputs(rows, D, RANK, name, BF16, str(gpu()))
        per_row = ("low", "normed")
        wrong = partial(
            against, hc_mix.hc_mix, hc_mix.hc_mix_reference, inputs, per_row, alone=rows <= 80, most=most(name, rows)
        )
        return Job(lambda _: hc_mix.hc_mix(**inputs), roofline.hc_mix(rows, D, STREAMS, RANK, name), wrong)

    return job


def torch_down_job(rows: int) -> Job:
    """What the kernels around the library's product replace: the same steps as calls to torch."""
    inputs: dict[str, Any] = hc_down.hc_down_inputs(rows, D, RANK, "bf16", BF16, str(gpu()))

    def run(_: int) -> Tensor:
        residual = inputs["residual"] + (inputs["y"].unsqueeze(-2) * inputs["y_weights"].unsqueeze(-1)).flatten(-2)
        normed = rms_norm(residual, inputs["norm_scale"], EPS, STREAMS)
        projected = F.linear(normed, inputs["down"][0].data) / STREAMS
        silu(projected[:, :RANK])
        return 2 * sigmoid(projected[:, RANK:])

    return Job(run, roofline.hc_down(rows, D, STREAMS, RANK, "bf16"), list)


def torch_mix_job(rows: int) -> Job:
    """The same for hc_mix."""
    inputs: dict[str, Any] = hc_mix.hc_mix_inputs(rows, D, RANK, "bf16", BF16, str(gpu()))

    def run(_: int) -> Tensor:
        gate = sigmoid(F.linear(inputs["low"], inputs["up"][0].data))
        return (gate * inputs["normed"]).unflatten(-1, (STREAMS, -1)).mean(-2)

    return Job(run, roofline.hc_mix(rows, D, STREAMS, RANK, "bf16"), list)


def product_maker(shape: str, name: str) -> Maker:
    n, k = PRODUCTS[shape]
    held: list[list[PackedWeight]] = []

    def job(rows: int) -> Job:
        if not held:
            first = quantize(torch.randn(n, k, device=gpu()) / k**0.5, name)
            copies = min(20, math.ceil(2e8 / first.num_bytes))  # three times the L2
            held.append([replace(first, data=first.data.clone()) for _ in range(copies)])
        weights = held[0]
        x = torch.randn(rows, k, device=gpu()).to(BF16)

        def wrong() -> list[str]:
            ours = packed_product(x, (weights[0],))
            found = differences(ours, F.linear(x.float(), weights[0].dequantize()).to(BF16))
            alone = packed_product(x[-1:], (weights[0],))
            return found if same(alone, ours[-1:]) else [*found, "the last row has other bits alone"]

        moved = roofline.linear(rows, n, k, name)
        return Job(lambda i: packed_product(x, (weights[i % len(weights)],)), moved, wrong)

    return job


# operator, where or how -> what makes it, and the numbers of rows
PARTS: dict[str, tuple[Maker, tuple[int, ...]]] = {
    "embed": (embed_job, ROWS),
    "ngram_rows": (rows_job, ROWS),
    **{f"ngram_gather,{name},device": (gather_maker(name, False), ROWS) for name in ("fp8_tensor", "bf16", "nvfp4")},
    "ngram_gather,fp8_tensor,pinned": (gather_maker("fp8_tensor", True), ROWS),
    "ple_mix": (ple_job, ROWS),
    "mtp_norm": (norm_job, ROWS),
    "mtp_fuse": (fuse_job, ROWS),
    "take_rows": (take_job, DECODE),
    "qsa_prepare": (prepare_maker(False), ROWS),
    "qsa_prepare,settled": (prepare_maker(True), DECODE),
    **{f"hc_down,{name}": (down_maker(name), ROWS) for name in ("bf16", "fp8_channel")},
    **{f"hc_mix,{name}": (mix_maker(name), ROWS) for name in ("bf16", "fp8_channel")},
    "hc_down,torch": (torch_down_job, (PREFILL,)),
    "hc_mix,torch": (torch_mix_job, (PREFILL,)),
    **{
        f"product,{shape},{name}": (product_maker(shape, name), DECODE)
        for shape in PRODUCTS
        for name in ("bf16", "fp8_channel", "fp8_block", "mxfp8", "nvfp4")
    },
}


# ---------------------------------------------------------------------- times


def timed_jobs(name: str) -> Iterator[tuple[int, int, Job]]:
    """Rows, calls in one graph, and the job."""
    make, rows = PARTS[name]
    for count in rows:
        yield count, 5 if count == PREFILL else 20, make(count)


def time_part(name: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By number of rows: us a call, bytes, share of the floor."""
    result: dict[str, dict[str, float]] = {}
    for rows, calls, job in timed_jobs(name):

        def run(job: Job = job, calls: int = calls) -> None:
            for i in range(calls):
                job.run(i)

        us = medians_us({"": load_and_capture(run)}, calls, options.rounds)[""]
        floor_us = job.moved / options.bandwidth * 1e6
        result[str(rows)] = {"us": round(us, 2), "bytes": job.moved, "fraction": round(floor_us / us, 3)}
    text = "  ".join(f"{rows}: {r['us']:.1f} ({r['fraction']:.0%})" for rows, r in result.items())
    say(f"{name:32} {text}")
    return result


if __name__ == "__main__":
    sys.exit(main())
