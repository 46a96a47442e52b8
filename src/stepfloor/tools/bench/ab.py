"""bench ab: run the arms of a plan round by round, and stop when the plan says so.

Every run is written to the report before the next begins, so an interrupted comparison goes on where it was. A round
in which something broke is kept with its reason and repeated in its place, so that the order stays balanced.
"""

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from stepfloor.errors import UserError
from stepfloor.tools.bench.arms import check_arms, check_programs, properties, telling
from stepfloor.tools.bench.launch import BrokenArm, Server, start
from stepfloor.tools.bench.plan import AccuracyGate, ArmPlan, LookLevel, Plan, order_of
from stepfloor.tools.bench.report import INTERRUPTED, LOOPED, Look, Report, Run, conclude, metric_of, read_report
from stepfloor.tools.bench.result import Result

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measure:
    """How a server is measured: load(url, parameters, seed, how the arm was started), and accuracy(url, gate, seed).

    Both raise UserError for what the reader of the plan can fix, which ends the bench.
    """

    load: Callable[[str, Mapping[str, Any], int, Mapping[str, str]], Result]
    accuracy: Callable[[str, AccuracyGate, int], Result]


def run_plan(
    plan: Plan,
    path: Path,
    directory: Path,
    environment: Mapping[str, str],
    measure: Measure,
    say: Callable[[str], None] = log.info,
) -> Report:
    """Run a comparison, or go on with the one that is in `path`, and return its report.

    directory  of the plan; logs of launched arms lie beside the report. Raises UserError for arms that are not equal
    but for the variable, for a report of another plan, and for what the reader can fix on this machine.
    """
    report = _open(plan, path, directory, environment)
    if report.ended is not None:
        return report
    say(report.stated)
    session = 1 + max((run.session for run in report.runs), default=-1)
    with _Servers(plan, directory, path.with_suffix(".logs"), environment) as servers:
        report = _accuracy(report, servers, measure, path, say)
        while report.ended is None:
            if _look_is_due(report):
                report = _look(report, say)
            elif report.too_many_broken:
                report = replace(report, ended=f"{len(report.broken)} broken rounds are too many")
            else:
                report = _round(report, session, servers, measure, path, say)
            report.write(path)
    return report


def noise_from(plan: Plan, null: Report) -> Plan:
    """The plan with what a comparison of an arm with itself showed: its noise, and the floor that effects must pass."""
    outcome = conclude(null)
    first = next((c for c in outcome.comparisons if c.series.metric == plan.metrics[0].metric), None)
    if not null.plan.null or outcome.floor_percent is None or first is None or first.paired is None:
        raise UserError(
            "the noise floor is taken from a finished report of `bench ab --null` with the same first metric"
        )
    noise = (first.percent(first.paired.sd) or 0.0) / 2**0.5
    return replace(plan, floor_percent=outcome.floor_percent, noise_percent=noise)


def _open(plan: Plan, path: Path, directory: Path, environment: Mapping[str, str]) -> Report:
    found = check_arms(plan)
    check_programs(plan, directory, environment.get("PATH"))
    told = telling(environment)
    if not path.exists():
        return Report(plan, found, told, datetime.now(UTC).isoformat(timespec="seconds"), plan.stated())
    report = read_report(path)
    if report.plan.digest != plan.digest:
        raise UserError(
            f"{path} is the report of another plan, {report.plan.name!r}; name another file or move it away"
        )
    if report.environment != told and report.ended is None:
        changed = sorted(
            name for name in {*told, *report.environment} if told.get(name) != report.environment.get(name)
        )
        raise UserError(f"{path} was begun with other values of {', '.join(changed)}; set them again or begin anew")
    # an attempt that has no end is one that was interrupted
    last = report.runs[-1].attempt if report.runs else -1
    if report.ended is None and len(report.attempts.get(last, ())) < len(plan.arms):
        runs = (replace(r, broken=r.broken or INTERRUPTED) if r.attempt == last else r for r in report.runs)
        report = replace(report, runs=tuple(runs))
    return report


def _round(
    report: Report, session: int, servers: "_Servers", measure: Measure, path: Path, say: Callable[[str], None]
) -> Report:
    """One try of one round; the report is written after each run, and the first that breaks ends the round."""
    plan, number = report.plan, len(report.whole)
    attempt = 1 + max(report.attempts, default=-1)
    for place in order_of(number, len(plan.arms)):
        arm = plan.arms[place]
        if report.runs:
            time.sleep(plan.cool_down_s)
        run = Run(
            at=len(report.runs),
            round=number,
            attempt=attempt,
            arm=arm.name,
            seed=_seed(plan, attempt, place),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            session=session,
        )
        run = _measured(run, arm, report, servers, measure)
        report = replace(report, runs=(*report.runs, run))
        report.write(path)
        say(_line(run, plan))
        if run.broken is not None:
            break
    return report


def _seed(plan: Plan, attempt: int, place: int) -> int:
    """Prompts are the same for all arms of a try and new in the next, so that no cache remembers them.

    Arms that are one server get different ones for the same reason.
    """
    shared = len({arm.url for arm in plan.arms if arm.url}) < sum(arm.url is not None for arm in plan.arms)
    return plan.seed + len(plan.arms) * attempt + (place if shared else 0)


def _measured(run: Run, arm: ArmPlan, report: Report, servers: "_Servers", measure: Measure) -> Run:
    try:
        with servers.running(arm, f"{run.at:03d}-{arm.name}.log") as server:
            identity = dict(server.identity or {})
            known = next((r.identity for r in report.runs if r.arm == arm.name and r.identity), identity)
            if known != identity:
                return replace(run, broken=f"{arm.name} was {known} before and is {identity} now", identity=identity)
            try:
                result = measure.load(server.url, report.plan.load, run.seed, properties(arm))
            finally:
                server.check()  # an arm that died is the reason for whatever its client says
    except BrokenArm as error:
        return replace(run, broken=str(error))
    if any(flag.code == "partial" for flag in result.flags):
        raise KeyboardInterrupt  # the client ended its run well, and the comparison is to end as well
    flags = [flag for flag in result.flags if flag.invalidates and flag.code != LOOPED]
    broken = "; ".join(f"{arm.name}: {flag.text}" for flag in flags) or None
    return replace(run, identity=identity, result=result, broken=broken)


def _line(run: Run, plan: Plan) -> str:
    where = f"round {run.round + 1} of {plan.most}, {run.arm}"
    if run.broken is not None or run.result is None:
        return f"{where}: BROKEN, the round does not count: {run.broken}"
    found = metric_of(run.result, plan.metrics[0].metric)
    return f"{where}: {plan.metrics[0].metric} " + ("is not there" if found is None else f"{found[0]:.5g} {found[1]}")


def _look_is_due(report: Report) -> bool:
    n = len(report.whole)
    return n in report.plan.looks and (not report.looks or report.looks[-1].rounds < n)


def _look(report: Report, say: Callable[[str], None]) -> Report:
    """Look at the first metric, and end where every arm's is resolved or the rounds are used up."""
    plan, n = report.plan, len(report.whole)
    outcome = conclude(replace(report, ended="for this look"))
    first = [c for c in outcome.comparisons if c.series.metric == plan.metrics[0].metric]
    words = {c.series.arm_name: c.verdict.word for c in first}
    level = LookLevel((*(look.rounds for look in report.looks), n), plan.most)(1, plan.alpha)
    report = replace(report, looks=(*report.looks, Look(n, level, words)))
    if n >= plan.most:
        return replace(report, ended=f"{n} rounds, as planned")
    if words and "unresolved" not in words.values():
        return replace(report, ended=f"resolved at {n} of at most {plan.most} rounds")
    said = ", ".join(f"{arm}: {word}" for arm, word in words.items())
    say(f"interim look {len(report.looks)} of at most {len(plan.looks)}, after {n} rounds, no verdict yet: {said}")
    return report


def _accuracy(report: Report, servers: "_Servers", measure: Measure, path: Path, say: Callable[[str], None]) -> Report:
    """Accuracy of each arm, once and before any speed is known."""
    gate = report.plan.accuracy
    if gate is None:
        return report
    for arm in report.plan.arms:
        if arm.name in report.accuracy:
            continue
        try:
            with servers.running(arm, f"accuracy-{arm.name}.log") as server:
                result = measure.accuracy(server.url, gate, report.plan.seed)
        except BrokenArm as error:
            raise UserError(f"accuracy of {arm.name} cannot be measured: {error}") from None
        report = replace(report, accuracy={**report.accuracy, arm.name: result})
        report.write(path)
        say(f"accuracy of {arm.name}: {sum(item.correct for item in result.items)} of {len(result.items)} items")
    return report


class _Servers:
    """The arms' servers: one at a time, or all side by side until the end."""

    def __init__(self, plan: Plan, directory: Path, logs: Path, environment: Mapping[str, str]) -> None:
        self.plan, self.directory, self.logs, self.environment = plan, directory, logs, environment
        self.kept: dict[str, Server] = {}
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    @contextmanager
    def running(self, arm: ArmPlan, log_name: str) -> Generator[Server]:
        """The arm's server, ready. Raises BrokenArm where it cannot be made so, or ended since it was used last."""
        server = self.kept.get(arm.name)
        if server is None:
            server = start(arm, self.directory, self.logs / log_name, self.environment, self.plan.health)
            if self.plan.together:
                self.kept[arm.name] = server
                self.stack.callback(server.stop, self.plan.health.stop_s)
        try:
            server.check()
            yield server
        finally:
            if not self.plan.together or server.ended:
                self.kept.pop(arm.name, None)
                server.stop(self.plan.health.stop_s)
