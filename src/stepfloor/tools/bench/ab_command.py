"""bench ab and bench compare, as the command line calls them: measure with the load of bench serve, show, and store."""

import asyncio
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from stepfloor.errors import UserError
from stepfloor.tools.bench.ab import Measure, noise_from, run_plan
from stepfloor.tools.bench.accuracy import Plan as AccuracyPlan
from stepfloor.tools.bench.accuracy import measure_accuracy
from stepfloor.tools.bench.client import Client
from stepfloor.tools.bench.compare import compare, read_arm
from stepfloor.tools.bench.load import Load
from stepfloor.tools.bench.page import write_page
from stepfloor.tools.bench.plan import AccuracyGate, Plan
from stepfloor.tools.bench.plan_file import asked, read_plan
from stepfloor.tools.bench.questions import load_profile
from stepfloor.tools.bench.report import conclude, finite, read_report
from stepfloor.tools.bench.result import Result
from stepfloor.tools.bench.serve import run
from stepfloor.tools.bench.show_ab import show_report, show_stored

_ACCURACY_OPTIONS = ("file", "items", "concurrency", "max_tokens", "thinking")


def run_ab(
    path: Path,
    environment: Mapping[str, str],
    *,
    output: Path | None = None,
    null: bool = False,
    null_report: Path | None = None,
    html: Path | None = None,
    as_json: bool = False,
) -> None:
    """Run a plan, or go on with it, and show what follows."""
    plan = read_plan(path)
    if null_report is not None:
        plan = noise_from(plan, read_report(null_report))
    if null:
        plan = plan.against_itself()
    _check(plan)
    file = output or path.with_suffix(".null.json" if null else ".report.json")
    # whoever ends this process must not leave servers behind that hold a GPU's memory
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        report = run_plan(plan, file, path.parent, environment, measure(), lambda line: print(line, file=sys.stderr))
    except KeyboardInterrupt:
        raise UserError(f"interrupted; {file} keeps what was measured, and the same command goes on") from None
    finally:
        signal.signal(signal.SIGTERM, before)
    outcome = conclude(report)
    if html is not None:
        shown = [r for r in report.runs if r.result is not None]
        write_page([r.result for r in shown if r.result], html, outcome.comparisons, [r.arm for r in shown])
    if as_json:
        print(json.dumps(finite(asdict(outcome)), allow_nan=False))
        return
    show_report(report, outcome, _console())
    print(f"report: {file}")


def compare_stored(
    base: str,
    arm: str,
    metrics: Sequence[str],
    variable: Sequence[str],
    alpha: float,
    *,
    html: Path | None = None,
    as_json: bool = False,
) -> None:
    """Compare stored results. A metric is NAME, NAME=MARGIN, or NAME:lower=MARGIN for one that is not known."""
    ours, theirs = read_arm(base), read_arm(arm)
    stored = compare(
        ours, theirs, [_metric(text) for text in metrics], variable=variable, names=_names(base, arm), alpha=alpha
    )
    if html is not None:
        before, after = _names(base, arm)
        write_page([*ours, *theirs], html, stored.comparisons, [before] * len(ours) + [after] * len(theirs))
    if as_json:
        print(json.dumps(finite(asdict(stored)), allow_nan=False))
    else:
        show_stored(stored, _console())


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def measure() -> Measure:
    """The load of bench serve and the profiles of bench accuracy."""
    return Measure(_load, _accuracy)


def _load(url: str, parameters: Mapping[str, Any], seed: int, config: Mapping[str, str]) -> Result:
    return run(url, Load.of({**parameters, "seed": seed}), server_config=config)


def _accuracy(url: str, gate: AccuracyGate, seed: int) -> Result:
    options = dict(gate.options)
    file, items = options.pop("file", None), options.pop("items", None)
    profile = load_profile(gate.profile, None if file is None else Path(file), items)

    async def ask() -> Result:
        client = Client(url)
        try:
            return await measure_accuracy(client, profile, AccuracyPlan(**options))
        finally:
            client.close()

    return asyncio.run(ask())


def _check(plan: Plan) -> None:
    """Refuse before the first launch what the first run would refuse."""
    if "seed" in plan.load:
        raise UserError("seed stands at the top of the plan, not in [load]: each round has another one")
    Load.of(plan.load).resolve()
    if plan.accuracy is not None:
        for name in plan.accuracy.options:
            if name not in _ACCURACY_OPTIONS:
                raise UserError(f"[accuracy.options] has no {name!r}; known are {', '.join(_ACCURACY_OPTIONS)}")
        file = plan.accuracy.options.get("file")
        load_profile(plan.accuracy.profile, None if file is None else Path(file), plan.accuracy.options.get("items"))


def _metric(text: str) -> Any:
    name, _, margin = text.partition("=")
    name, _, better = name.partition(":")
    return asked(name, better or None, margin or None, f"--metric {text}")


def _names(base: str, arm: str) -> tuple[str, str]:
    """Short names of two arms: those of their first files, or A and B where these are equal."""
    names = Path(base.split(",")[0]).stem, Path(arm.split(",")[0]).stem
    return names if names[0] != names[1] else ("A", "B")


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, markup=False)
