"""bench compare: stored results of two arms, in pairs, and only where they answer the same question.

One file of each arm is one pair, and one pair shows no rate: repeat, or use `bench ab`. Items of accuracy runs are
pairs by themselves. Rates of two machines are not compared, except what the machine has no part in: steps/s beside the
acceptance length say how fast each steps and how much a step delivers.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepfloor.errors import UserError
from stepfloor.tools.bench.proportions import McNemar, mcnemar, wilson
from stepfloor.tools.bench.report import metric_of
from stepfloor.tools.bench.result import Result, read_results
from stepfloor.tools.bench.statistics import holm
from stepfloor.tools.bench.verdict import Asked, Comparison, Series, judge

# what results are compared by, if nothing is asked for, in this order
USUAL = {
    "output_throughput": True,
    "steps_per_s": True,
    "acceptance_length": True,
    "ttft_ms": False,
    "tpot_ms": False,
    "itl_ms": False,
    "e2e_ms": False,
}
ACROSS_MACHINES = ("steps_per_s", "acceptance_length")
# parts of a load that follow from the rest and from the model's name
_DERIVED = ("bodies_sha256", "prompt_source")


@dataclass(frozen=True, slots=True)
class Items:
    """The items of one pair of accuracy runs; intervals of both shares, and whether they differ beyond chance."""

    pair: int
    counts: McNemar
    base_share: tuple[float, float]
    arm_share: tuple[float, float]
    differ: bool
    level: float


@dataclass(frozen=True, slots=True)
class Stored:
    """Two arms of stored results, compared.

    differences  what the two were started with and differs, as it was named beforehand
    set_aside    pairs that do not count, and metrics that are not compared, with the reason
    """

    base_name: str
    arm_name: str
    pairs: int
    differences: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    items: tuple[Items, ...]
    set_aside: tuple[str, ...]


def read_arm(text: str) -> list[Result]:
    """Results of files with commas between, or of the files in a directory in the order of their names."""
    paths = [Path(part) for part in text.split(",") if part]
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    found = [result for file in files for result in read_results(file)]
    if not found:
        raise UserError(f"there is no result in {text!r}; pass files that `stepfloor bench` wrote")
    return found


def compare(
    base: Sequence[Result],
    arm: Sequence[Result],
    asked: Sequence[Asked] = (),
    *,
    variable: Sequence[str] = (),
    names: tuple[str, str] = ("A", "B"),
    alpha: float = 0.05,
) -> Stored:
    """Compare results pair by pair, in the order they are given.

    variable  what the arms' configurations may differ in; without it nothing may
    Raises UserError where results are not of the same load, do not say how their servers were started, or differ in
    more than the variable.
    """
    if len(base) != len(arm):
        raise UserError(
            f"pairs need as many results of {names[0]} as of {names[1]}; got {len(base)} and {len(arm)}: pass those "
            "that ran beside each other, in the same order"
        )
    _check_loads(base, arm, names)
    found = _check_configs(base, arm, variable, names)
    kept, set_aside = _quarantine(base, arm, names)
    items = [one for one in kept if base[one].items and arm[one].items]
    timed = [one for one in kept if base[one].kind != "accuracy"]
    chosen = _choose(asked, [base[i] for i in timed] + [arm[i] for i in timed])
    machines = _machines(base), _machines(arm)
    if machines[0] != machines[1]:
        dropped = [one.metric for one in chosen if one.metric.split(".")[0] not in ACROSS_MACHINES]
        chosen = [one for one in chosen if one.metric.split(".")[0] in ACROSS_MACHINES]
        if dropped:
            set_aside.append(
                f"{', '.join(dropped)}: measured on {machines[0]} and on {machines[1]}; across machines only "
                f"{' and '.join(ACROSS_MACHINES)} compare"
            )
    series = [_series(one, base, arm, timed, names) for one in chosen]
    comparisons = judge(series, {one.metric: one for one in chosen}, alpha=alpha)
    return Stored(
        *names, len(kept), tuple(found), comparisons, _items(base, arm, items, names, alpha), tuple(set_aside)
    )


def _check_loads(base: Sequence[Result], arm: Sequence[Result], names: tuple[str, str]) -> None:
    for i, (a, b) in enumerate(zip(base, arm, strict=True), 1):
        if a.kind != b.kind:
            raise UserError(f"pair {i} is of two kinds, {a.kind} and {b.kind}; compare like with like")
        if not a.load or not b.load:
            raise UserError(
                f"pair {i} does not say with what load it was measured; measure it with `stepfloor bench serve`"
            )
        differ = _differences(_told(a.load), _told(b.load), names)
        if differ:
            raise UserError(
                f"pair {i} was measured with two loads: {'; '.join(differ)}; measure both with one load and one seed"
            )


def _told(load: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in load.items() if name not in _DERIVED}


def _check_configs(
    base: Sequence[Result], arm: Sequence[Result], variable: Sequence[str], names: tuple[str, str]
) -> list[str]:
    """What the two configurations differ in, in words."""
    for name, results in zip(names, (base, arm), strict=True):
        for result in results:
            if not result.target.config and result.kind != "accuracy":
                raise UserError(
                    f"a result of {name} does not say how its server was started, so nobody knows what is compared; "
                    "measure with --server-config, or with `stepfloor bench ab`"
                )
            differ = _differences(results[0].target.config, result.target.config, ("first", "later"))
            if differ:
                raise UserError(f"results of {name} are of different servers: {'; '.join(differ)}")
    ours, theirs = _identity(base[0]), _identity(arm[0])
    found = {
        name: f"{name} ({names[0]}: {_brief(ours.get(name))}, {names[1]}: {_brief(theirs.get(name))})"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    }
    undeclared = [text for name, text in found.items() if name not in variable]
    if undeclared:
        raise UserError(
            f"the servers differ in {'; '.join(undeclared)}; name what is compared with --variable, or measure again"
        )
    return list(found.values())


def _identity(result: Result) -> dict[str, Any]:
    target = result.target
    told = {"model": target.model, "server": target.server, "server_version": target.server_version}
    return {**told, **target.config}


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> list[str]:
    return [
        f"{name} ({names[0]}: {_brief(a.get(name))}, {names[1]}: {_brief(b.get(name))})"
        for name in sorted({*a, *b})
        if a.get(name) != b.get(name)
    ]


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _quarantine(base: Sequence[Result], arm: Sequence[Result], names: tuple[str, str]) -> tuple[list[int], list[str]]:
    """(pairs in which both results count, the others with the reason)."""
    kept: list[int] = []
    aside: list[str] = []
    for i, pair in enumerate(zip(base, arm, strict=True)):
        reasons = [
            f"{name}: {flag.text}"
            for name, result in zip(names, pair, strict=True)
            for flag in result.flags
            if flag.invalidates
        ]
        if reasons:
            aside.append(f"pair {i + 1} does not count: {'; '.join(reasons)}")
        else:
            kept.append(i)
    return kept, aside


def _machines(results: Iterable[Result]) -> str:
    """The GPUs of a set of results, in words."""
    names = {device.name for result in results if result.telemetry for device in result.telemetry.devices}
    return ", ".join(sorted(names)) or "a machine without a visible GPU"


def _choose(asked: Sequence[Asked], results: Sequence[Result]) -> list[Asked]:
    if not asked:
        usual = [Asked(name, higher) for name, higher in USUAL.items()]
        return [one for one in usual if results and all(metric_of(r, one.metric) for r in results)]
    for one in asked:
        if any(metric_of(result, one.metric) is None for result in results):
            raise UserError(f"not every result has {one.metric}; they have {', '.join(sorted(results[0].metrics))}")
    return list(asked)


def _series(
    one: Asked, base: Sequence[Result], arm: Sequence[Result], pairs: Sequence[int], names: tuple[str, str]
) -> Series:
    values = [(metric_of(base[i], one.metric), metric_of(arm[i], one.metric)) for i in pairs]
    whole = [(a, b) for a, b in values if a is not None and b is not None]
    return Series(
        one.metric,
        whole[0][0][1] if whole else "",
        *names,
        tuple(pairs),
        tuple(a[0] for a, _ in whole),
        tuple(b[0] for _, b in whole),
    )


def _items(
    base: Sequence[Result], arm: Sequence[Result], pairs: Sequence[int], names: tuple[str, str], alpha: float
) -> tuple[Items, ...]:
    counted: list[tuple[int, McNemar]] = []
    for i in pairs:
        a, b = ({item.id: item.correct for item in results[i].items} for results in (base, arm))
        if a.keys() != b.keys():
            raise UserError(f"pair {i + 1} answered different items; measure both with the same profile")
        counted.append((i, mcnemar([a[key] for key in a], [b[key] for key in a])))
    outcomes = holm([found.p for _, found in counted], lambda standing: alpha / standing)
    return tuple(
        Items(i + 1, c, wilson(c.base_correct, c.n), wilson(c.arm_correct, c.n), differ, level)
        for (i, c), (differ, level) in zip(counted, outcomes, strict=True)
    )
