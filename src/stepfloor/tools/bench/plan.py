"""The plan of an A/B comparison, and the order of its runs.

There is no blocked order to ask for: whichever arm ran first would win on a machine that gets warm.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stepfloor.tools.bench.sequential import look_level
from stepfloor.tools.bench.statistics import detectable
from stepfloor.tools.bench.verdict import POWER, Asked


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """One arm as it was written, with what it shares filled in: a command to launch, or the URL of what runs already.

    command  words; {python} is this interpreter, {port} a free port, or `port` where one is named
    env      variables beside those that this process has
    cwd      relative to the plan's directory
    config   for a URL, what its owner says the server was started with
    """

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    port: int | None = None
    url: str | None = None
    config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HealthGate:
    """When a launched arm is ready: this route answers 200 within start_s, and it serves `model` where one is named."""

    route: str = "/health"
    start_s: float = 900.0
    stop_s: float = 60.0
    model: str | None = None


@dataclass(frozen=True, slots=True)
class AccuracyGate:
    """Each arm answers the items of this profile once; most_lost is the share of items it may lose to the base arm."""

    profile: str
    options: Mapping[str, Any] = field(default_factory=dict)
    most_lost: float = 0.02


@dataclass(frozen=True, slots=True)
class Plan:
    """A comparison, complete.

    least, most      whole rounds at the first look and at the last; equal where the number is fixed
    noise_percent    standard deviation of one run, assumed for the effect that is stated beforehand
    together         launched arms stay up side by side; otherwise one runs at a time
    most_broken      rounds that may break, as a share of `most`, before nothing can be concluded
    null             the base arm against itself
    floor_percent    from an earlier null run: smaller differences are not called an effect
    """

    name: str
    variable: tuple[str, ...]
    arms: tuple[ArmPlan, ...]
    metrics: tuple[Asked, ...]
    load: Mapping[str, Any]
    least: int
    most: int
    alpha: float = 0.05
    seed: int = 0
    noise_percent: float = 2.0
    together: bool = False
    cool_down_s: float = 0.0
    most_broken: float = 0.25
    health: HealthGate = field(default_factory=HealthGate)
    accuracy: AccuracyGate | None = None
    null: bool = False
    floor_percent: float = 0.0

    @property
    def digest(self) -> str:
        """Tells one plan from another."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arms; the first is the base."""
        return tuple(arm.name for arm in self.arms)

    @property
    def looks(self) -> tuple[int, ...]:
        """Whole rounds at which the comparison may end."""
        step = len(orders(len(self.arms)))
        return tuple(range(self.least, self.most + 1, step))

    def level(self, looks: Sequence[int]) -> "LookLevel":
        """The level of one test at the last of these looks."""
        return LookLevel(tuple(looks), self.most)

    def against_itself(self) -> "Plan":
        """The same plan with the base arm in both places, at the full number of rounds: what is found then is noise."""
        twin = replace(self.arms[0], name=f"{self.arms[0].name} again")
        most = self.most + self.most % 2
        return replace(self, arms=(self.arms[0], twin), variable=(), null=True, least=most, most=most)

    def stated(self) -> str:
        """What this plan can see, said before its first round."""
        # a difference of two runs spreads by the square root of two; arms and metrics share alpha in the worst case
        tests = len(self.metrics) * (len(self.arms) - 1)
        level = self.level(self.looks)(tests, self.alpha)
        least = detectable(self.most, math.sqrt(2) * self.noise_percent, level, POWER, lost=2)
        rounds = f"{self.most} rounds" if self.least == self.most else f"{self.least} to {self.most} rounds"
        return (
            f"{rounds} of {' and '.join(self.names)}; with noise of {self.noise_percent:g} % a run, differences of "
            f"{least:.1f} % or more are found {POWER:.0%} of the time"
        )


@dataclass(frozen=True, slots=True)
class LookLevel:
    """Level of one test where `standing` hypotheses share alpha, at the last of these looks."""

    looks: tuple[int, ...]
    planned: int

    def __call__(self, standing: int, alpha: float) -> float:
        return look_level(self.looks, self.planned, alpha / standing)


def orders(arms: int) -> tuple[tuple[int, ...], ...]:
    """Orders in which rounds run, one after another and from the start again: two arms give ABBA.

    A balanced Latin square: each arm stands in each place equally often, and follows each other arm equally often. For
    an odd number of arms that takes the square and its mirror image. Source: E. J. Williams (1949).
    """
    if arms < 2:
        raise ValueError(f"orders wants two arms or more; got {arms}")
    first = [0]
    for step in range(1, arms):
        first.append((first[-1] + (step if step % 2 else -step)) % arms)
    rows = [tuple((arm + shift) % arms for arm in first) for shift in range(arms)]
    return tuple(rows) if arms % 2 == 0 else tuple(rows + [row[::-1] for row in rows])


def order_of(round_: int, arms: int) -> tuple[int, ...]:
    """The order of round 0, 1, ..."""
    square = orders(arms)
    return square[round_ % len(square)]
