"""Show the floor of a step: tables and bars for people, JSON for programs, and a picture."""

import json
from pathlib import Path
from typing import Any

from stepfloor.config import ModelConfig
from stepfloor.errors import UserError
from stepfloor.roofline.floor import GB, GIB
from stepfloor.roofline.hardware import GPUS
from stepfloor.roofline.memory import MemoryPlan
from stepfloor.roofline.shards import matrix_shapes
from stepfloor.tools.floor.bars import bar, svg_bars
from stepfloor.tools.floor.report import Question, answer
from stepfloor.weights.checkpoint import Checkpoint


def show(
    checkpoint: Checkpoint,
    question: Question,
    plan: MemoryPlan | None = None,
    *,
    as_json: bool = False,
    plot: Path | None = None,
    shapes: bool = False,
) -> None:
    """Print the answer: tables and bars for people, or one JSON object; a picture where one is asked for."""
    report = answer(checkpoint, question)
    if plan is not None:
        report["memory"] = _memory_report(plan)
    if plot is not None:
        plot_report(report, plot)
    if as_json:
        print(json.dumps(report))
        return
    for line in _text(report):
        print(line)
    if shapes:
        print()
        for line in _shapes_text(checkpoint.config, question):
            print(line)
    if plan is not None:
        print()
        for line in _memory_text(plan):
            print(line)


def show_devices(as_json: bool = False) -> None:
    """The table of devices, each row with its source."""
    if as_json:
        rows = [
            {
                "name": d.name,
                "memory_bytes": d.memory_bytes,
                "bandwidth_gbps": d.bandwidth_gbps,
                "read_gbps": d.read_gbps,
                "achieved": list(d.achieved),
                "unified": d.unified,
                "link": d.link,
                "source": d.source,
            }
            for d in GPUS.values()
        ]
        print(json.dumps(rows))
        return
    print(f"{'device':13} {'memory GiB':>10} {'GB/s':>6} {'read':>6} {'reached':>12}  source")
    for d in GPUS.values():
        read = f"{d.read_gbps:.0f}" if d.read_gbps else "-"
        memory = f"{d.memory_bytes / GIB:.1f}{'u' if d.unified else ' '}"
        print(
            f"{d.name:13} {memory:>10} {d.bandwidth_gbps:6.0f} {read:>6} {d.achieved[0]:5.2f} to {d.achieved[1]:.2f}  "
            f"{d.source}"
        )
    print("u: unified with the host's. read: a streaming kernel's, where measured; --bandwidth wins over both")


def _text(report: dict[str, Any]) -> list[str]:
    where = f"{report['devices']} x {report['device']}" if report["devices"] > 1 else report["device"]
    parallel = ", whole experts on each" if report["expert_parallel"] else ""
    each = " on each device" if report["devices"] > 1 else ""
    lines = [
        f"{report['model']} on {where}{parallel}: sequences {report['sequences']}, drafts {report['spec_tokens']}, "
        f"context {report['context_tokens']} tokens, distinct experts {report['distinct_experts']:.1f} a layer",
        "",
        *_case_text(report["now"], report, each),
    ]
    if "what_if" in report:
        after, now = report["what_if"], report["now"]
        lines += ["", f"with {after['change']}:", "", *_case_text(after, report, each)]
        lines.append(
            f"{now['floor_ms'] / after['floor_ms']:.2f} times the rate by bytes alone; launches and small kernels do "
            "not shrink with bytes, so expect less (dense=fp8: +40 to +60 % promised so, +17.5 to +23 % measured)"
        )
    if report["levers"]:
        width = max(len(lever["lever"]) for lever in report["levers"])
        lines += ["", f"{'what would save':{width}} {'ms':>7} {'step':>6}  how; quality risk"]
        for lever in report["levers"]:
            start = f"{lever['lever']:{width}} {lever['saved_ms']:7.2f} {100 * lever['share']:5.1f}%"
            lines.append(f"{start}  {lever['work']}".rstrip())
            if lever["risk"]:
                lines.append(f"{'':{len(start)}}  {lever['risk']}")
    if "choices" in report:
        lines += ["", "drafts  tokens/step  floor ms  tokens/s"]
        for c in report["choices"]["choices"]:
            best = "  best" if c["spec_tokens"] == report["choices"]["best"] else ""
            lines.append(
                f"{c['spec_tokens']:6} {c['tokens_per_step']:12.2f} {c['floor_ms']:9.2f} {c['tokens_per_s']:9.1f}{best}"
            )
    return lines


def _case_text(case: dict[str, Any], report: dict[str, Any], each: str) -> list[str]:
    rows = [c for c in case["components"] if c["target_bytes"] + c["draft_bytes"] >= 0.0005 * case["step_bytes"]]
    largest = rows[0]["target_bytes"] + rows[0]["draft_bytes"]
    lines = [f"{'read a step' + each:28} {'format':22} {'target GB':>9} {'drafts GB':>9} {'share':>6}"]
    for c in rows:
        both = c["target_bytes"] + c["draft_bytes"]
        lines.append(
            f"{c['component']:28} {'+'.join(c['formats'])[:22]:22} {c['target_bytes'] / GB:9.3f} "
            f"{c['draft_bytes'] / GB:9.3f} {100 * both / case['step_bytes']:5.1f}% {bar(both / largest, 24)}".rstrip()
        )
    drafts = sum(case["draft_bytes"])
    lines += [
        f"{'total':28} {'':22} {case['target_bytes'] / GB:9.3f} {drafts / GB:9.3f}   = "
        f"{case['step_bytes'] / GB:.3f} GB ({case['step_bytes'] / GIB:.2f} GiB)",
        "",
    ]
    if case["exchanges"]:
        count = sum(e["count"] for e in case["exchanges"])
        first, last = case["exchanges_ms"]
        lines.append(f"{count} exchanges between devices: {first:.2f} to {last:.2f} ms")
    first, last = case["expected_ms"]
    low, high = case["tokens_per_s"]
    tokens = case["tokens_per_step"]
    accepted = f"{tokens[0]:.2f}" if tokens[0] == tokens[1] else f"{tokens[0]:.0f} to {tokens[1]:.0f}"
    at_floor = " to ".join(f"{rate:.1f}" for rate in dict.fromkeys(case["floor_tokens_per_s"]))
    lines += [
        f"floor     {case['floor_ms']:.2f} ms a step at {report['bandwidth_gbps']:g} GB/s ({report['bandwidth']}), "
        f"{1e3 / case['floor_ms']:.1f} steps/s, {at_floor} tokens/s",
        f"expected  {first:.2f} to {last:.2f} ms, {low:.1f} to {high:.1f} tokens/s with {accepted} tokens a step",
    ]
    return lines


def _shapes_text(config: ModelConfig, question: Question) -> list[str]:
    lines = [f"{'product':20} {'N x K':>15} {'bf16 MiB':>9} {'floor us':>9}"]
    for name, (n, k) in matrix_shapes(config, question.shards).items():
        size = 2 * n * k
        lines.append(f"{name:20} {f'{n} x {k}':>15} {size / 2**20:9.2f} {size / question.gbps / 1e3:9.2f}")
    return lines


def _memory_report(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "lines": [{"component": x.component, "bytes": x.nbytes, "where": x.where, "note": x.note} for x in plan.lines],
        "unified": plan.capacity.unified,
        "device_bytes": plan.total("device"),
        "device_available": plan.available("device"),
        "host_bytes": plan.total("host"),
        "host_available": plan.available("host"),
        "fits": plan.fits,
        "refusal": plan.refusal(),
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "max_pages": plan.max_pages,
    }


def _memory_text(plan: MemoryPlan) -> list[str]:
    engine = plan.engine
    lines = [
        f"memory for {engine.max_num_seqs} sequences of {engine.max_model_len} tokens, table {plan.table}",
        f"{'':28} {'GiB':>8}",
    ]
    for where in ("device", "host"):
        mine = [x for x in plan.lines if x.where == where]
        if not mine or (where == "host" and plan.capacity.unified):
            continue
        shown = [x for x in mine if x.nbytes >= 1 << 20 or x.note.endswith("free")]
        for x in shown:
            lines.append(f"{x.component:28} {x.nbytes / GIB:8.3f}  {x.note}".rstrip())
        small = sum(x.nbytes for x in mine if x not in shown)
        if small:
            lines.append(f"{'smaller parts':28} {small / GIB:8.3f}")
        pool = "unified memory" if plan.capacity.unified else where
        wanted, available = plan.total(where), plan.available(where)
        verdict = (
            f"{(available - wanted) / GIB:.2f} left" if wanted <= available else f"{plan.short(where) / GIB:.2f} short"
        )
        lines.append(f"{'total, ' + pool:28} {wanted / GIB:8.3f}  of {available / GIB:.2f} available: {verdict}")
    refusal = plan.refusal()
    lines.append(f"does not fit: {refusal}" if refusal else "fits")
    if plan.capacity.note:
        lines.append(plan.capacity.note)
    lines.append(
        f"largest context with {engine.max_num_seqs} sequences: {plan.max_model_len or 'none'}; most sequences of "
        f"{engine.max_model_len} tokens: {plan.max_num_seqs or 'none'}"
    )
    return lines


def plot_report(report: dict[str, Any], path: Path) -> None:
    """Draw the step's bytes: one stacked bar now, one after the change. Raises UserError for a file not .svg."""
    if path.suffix.lower() != ".svg":
        raise UserError(f"--plot writes SVG, which every browser shows; got {path.name!r}; end it in .svg")
    cases = [("now", report["now"])] + (
        [(report["what_if"]["change"], report["what_if"])] if "what_if" in report else []
    )
    bars = [
        (
            f"{label}: {case['step_bytes'] / GB:.2f} GB, {case['floor_ms']:.2f} ms",
            [(c["component"], (c["target_bytes"] + c["draft_bytes"]) / GB) for c in case["components"]],
        )
        for label, case in cases
    ]
    title = f"{report['model']} on {report['device']}: bytes of a decode step, {report['spec_tokens']} drafts"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg_bars(title, bars, "GB"), encoding="utf-8")
