"""Whole comparisons with a known truth: runs in the order a plan gives them, on a machine that drifts and is noisy.

python -m tests.tools.bench.simulate        # the record in benchmarks/bench-ab.md
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepfloor.tools.bench.plan import LookLevel, order_of
from stepfloor.tools.bench.verdict import Asked, Margin, Series, judge

RATE = Asked("output_throughput", True, Margin(2.0, True))


@dataclass(frozen=True)
class Machine:
    """Noise of a run and drift from one run to the next, in percent; effect of the arm b."""

    noise: float = 2.0
    drift: float = -1.0
    effect: float = 0.0


def compare_once(
    make: np.random.Generator, machine: Machine, looks: Sequence[int], metrics: int = 1
) -> tuple[str, int]:
    """(word, rounds it took) of a comparison that looks after these rounds: "effect" if any metric is called one."""
    most = looks[-1]
    order = np.array([order_of(i, 2) for i in range(most)])  # [rounds, 2]
    place = np.empty((most, 2), dtype=int)
    place[np.arange(most)[:, None], order] = np.arange(2 * most).reshape(most, 2)
    level = 100.0 + machine.drift * place
    level[:, 1] *= 1 + machine.effect / 100
    values = level[..., None] * (1 + machine.noise / 100 * make.standard_normal((most, 2, metrics)))
    asked = {f"m{i}": RATE for i in range(metrics)}
    for i, n in enumerate(looks):
        series = [
            Series(f"m{k}", "", "a", "b", tuple(range(n)), *columns(values[:n, :, k]), *columns(place[:n]))
            for k in range(metrics)
        ]
        found = judge(series, asked, level=LookLevel(tuple(looks[: i + 1]), most), resamples=0)
        words = [c.verdict.word for c in found]
        if words[0] != "unresolved" or n == most:
            return ("effect" if "effect" in words else words[0]), n
    raise ValueError("a comparison needs a look")


def columns(table: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Those of a table of two."""
    return tuple(table[:, 0].tolist()), tuple(table[:, 1].tolist())


def simulate(
    times: int, machine: Machine, looks: Sequence[int], seed: int = 0, metrics: int = 1
) -> tuple[Counter[str], float]:
    """(how often each word was said, mean number of rounds)."""
    make = np.random.default_rng(seed)
    outcomes = [compare_once(make, machine, looks, metrics) for _ in range(times)]
    return Counter(word for word, _ in outcomes), float(np.mean([n for _, n in outcomes]))


FIXED, SEQUENTIAL = (12,), tuple(range(4, 21, 2))


def main() -> None:
    """Print the table."""
    print("| truth | drift a run | rounds | metrics | effect | no effect | unresolved | mean rounds |")
    print("|---|---|---|---|---|---|---|---|")
    for looks in (FIXED, SEQUENTIAL):
        shown = f"{looks[0]}" if len(looks) == 1 else f"{looks[0]} to {looks[-1]}, {len(looks)} looks"
        for effect, drift, metrics in (
            (0, 0, 1),
            (0, -1, 1),
            (0, -3, 1),
            (0, -1, 3),
            (2, -1, 1),
            (3, 0, 1),
            (3, -1, 1),
        ):
            words, rounds = simulate(5000, Machine(2.0, drift, effect), looks, metrics=metrics)
            shares = " | ".join(f"{words[word] / 50:.1f} %" for word in ("effect", "no effect", "unresolved"))
            print(f"| {effect} % | {drift} % | {shown} | {metrics} | {shares} | {rounds:.1f} |")


if __name__ == "__main__":
    main()
