"""The file of an A/B plan: TOML, read strictly.

name = "drafts"
variable = "--spec-tokens"                 # what may differ: a flag, env:NAME, program, cwd, config:NAME
rounds = 12                                # or { least = 6, most = 20 }: looks that keep the error rate

[base]                                     # what all arms share
command = ["{python}", "-m", "stepfloor", "serve", "--port", "{port}"]
[arms.k0]                                  # the first arm is the one that others are compared with
switches = { "--spec-tokens" = "0" }
[arms.k3]
switches = { "--spec-tokens" = "3" }

[[metrics]]                                # the first decides when to stop
name = "output_throughput"
margin = "2 %"
[load]                                     # of `stepfloor bench serve`
concurrency = 1
"""

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepfloor.errors import UserError
from stepfloor.tools.bench.plan import AccuracyGate, ArmPlan, HealthGate, Plan, orders
from stepfloor.tools.bench.verdict import Asked, Margin

HIGHER_IS_BETTER = {
    "output_throughput": True,
    "total_throughput": True,
    "request_throughput": True,
    "per_user_rate": True,
    "goodput": True,
    "steps_per_s": True,
    "acceptance_length": True,
    "cache_hit_rate": True,
    "ttft_ms": False,
    "itl_ms": False,
    "tpot_ms": False,
    "e2e_ms": False,
    "ms_per_step": False,
}


class _Table:
    """A TOML table that is taken apart key by key; what is left over is refused with the nearest name it knows."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, dict):
            raise UserError(f"{where} must be a table; got {raw!r}")
        self.raw, self.where, self.known = dict(raw), where, list[str]()

    def take(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """The value of a key. Raises UserError if it is of another kind."""
        self.known.append(key)
        value = self.raw.pop(key, default)
        whole_for_float = kind is float and isinstance(value, int) and not isinstance(value, bool)
        wrong_bool = isinstance(value, bool) and kind is not bool
        if value is not default and not whole_for_float and (wrong_bool or not isinstance(value, kind)):
            names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise UserError(f"{self.where}: {key} must be {names}; got {value!r}")
        return value

    def finish(self) -> None:
        """Refuse what was not taken."""
        for key in self.raw:
            near = difflib.get_close_matches(key, self.known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(self.known)}"
            raise UserError(f"{self.where} has no {key!r}; {hint}")


def read_plan(path: Path) -> Plan:
    """Read a plan. Raises UserError with what is wrong in it."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the plan {path} ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    return parse_plan(raw, path.name)


def parse_plan(raw: Mapping[str, Any], where: str = "the plan") -> Plan:
    """A plan from its tables. Raises UserError with what is wrong in it."""
    top = _Table(raw, where)
    variable = top.take("variable", (str, list), [])
    base = top.take("base", dict, {})
    arms = tuple(_arm(name, base, own, where) for name, own in top.take("arms", dict, {}).items())
    metrics = tuple(_metric(one, where) for one in top.take("metrics", list, []))
    accuracy = top.take("accuracy", dict, {})
    rounds = _rounds(top.take("rounds", (int, dict), 12), where)
    plan = Plan(
        name=top.take("name", str, where),
        variable=(variable,) if isinstance(variable, str) else tuple(map(str, variable)),
        arms=arms,
        metrics=metrics or (Asked("output_throughput", True),),
        load=top.take("load", dict, {}),
        least=rounds[0],
        most=rounds[1],
        alpha=float(top.take("alpha", float, 0.05)),
        seed=top.take("seed", int, 0),
        noise_percent=Margin.parse(top.take("noise", str, "2 %")).size,
        together=top.take("together", bool, False),
        cool_down_s=float(top.take("cool_down_s", float, 0.0)),
        most_broken=float(top.take("most_broken", float, 0.25)),
        health=_health(top.take("health", dict, {}), where),
        accuracy=_accuracy(accuracy, where) if accuracy else None,
    )
    top.finish()
    _check(plan, where)
    return plan


def _arm(name: str, base: Any, own: Any, where: str) -> ArmPlan:
    shared, table = _Table(base, f"{where}: [base]"), _Table(own, f"{where}: [arms.{name}]")
    command = [str(word) for word in table.take("command", list, shared.take("command", list, []))]
    for flag, value in table.take("switches", dict, {}).items():
        command += [flag] if value is True else [] if value is False else [flag, str(value)]
    arm = ArmPlan(
        name,
        tuple(command),
        _strings({**shared.take("env", dict, {}), **table.take("env", dict, {})}),
        table.take("cwd", str, shared.take("cwd", str, "")) or None,
        table.take("port", int, shared.take("port", int, 0)) or None,
        table.take("url", str, shared.take("url", str, "")).rstrip("/") or None,
        _strings({**shared.take("config", dict, {}), **table.take("config", dict, {})}),
    )
    shared.finish()
    table.finish()
    if bool(arm.command) == bool(arm.url):
        raise UserError(f"{where}: arm {name} needs either a command or a url")
    if arm.command and not any("{port}" in word for word in arm.command):
        raise UserError(f"{where}: arm {name} must be told its port; write {{port}} where its command has one")
    if arm.url and not arm.config:
        raise UserError(
            f"{where}: arm {name} is a url, so nobody can see how its server was started; say it in "
            f"[arms.{name}.config], as flags or names with their values"
        )
    return arm


def _strings(table: Mapping[str, Any]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in table.items()}


def _metric(raw: Any, where: str) -> Asked:
    table = _Table(raw, f"{where}: [[metrics]]")
    name = table.take("name", str, "")
    better = table.take("better", str, "")
    margin = table.take("margin", (str, int, float), "")
    table.finish()
    return asked(name, better or None, margin or None, f"{where}: metric {name!r}")


def asked(name: str, better: str | None, margin: object | None, where: str) -> Asked:
    """A metric to compare; what is good about it is known for the usual ones."""
    higher = HIGHER_IS_BETTER.get(name.split(".")[0])
    if better not in (None, "higher", "lower") or (better is None and higher is None):
        raise UserError(f'{where} needs better = "higher" or "lower"; got {better!r}')
    return Asked(name, better == "higher" if better else bool(higher), None if margin is None else Margin.parse(margin))


def _rounds(raw: Any, where: str) -> tuple[int, int]:
    if isinstance(raw, int):
        return raw, raw
    table = _Table(raw, f"{where}: rounds")
    least, most = table.take("least", int, 6), table.take("most", int, 20)
    table.finish()
    return least, most


def _health(raw: Any, where: str) -> HealthGate:
    table, usual = _Table(raw, f"{where}: [health]"), HealthGate()
    gate = HealthGate(
        table.take("route", str, usual.route),
        float(table.take("start_s", float, usual.start_s)),
        float(table.take("stop_s", float, usual.stop_s)),
        table.take("model", str, "") or None,
    )
    table.finish()
    return gate


def _accuracy(raw: Any, where: str) -> AccuracyGate:
    table = _Table(raw, f"{where}: [accuracy]")
    gate = AccuracyGate(
        table.take("profile", str, ""),
        table.take("options", dict, {}),
        Margin.parse(table.take("most_lost", str, "2 %")).size / 100,
    )
    table.finish()
    return gate


def _check(plan: Plan, where: str) -> None:
    if len(plan.arms) < 2:
        raise UserError(f"{where}: a comparison needs two arms; it has {len(plan.arms)}")
    square = len(orders(len(plan.arms)))
    if plan.least % square or plan.most % square or not 4 <= plan.least <= plan.most:
        raise UserError(
            f"{where}: rounds must be multiples of {square}, so that each arm is in each place equally often, and at "
            f"least 4; got {plan.least if plan.least == plan.most else (plan.least, plan.most)}"
        )
    if not 0 < plan.alpha < 0.5 or not 0 <= plan.most_broken <= 1:
        raise UserError(f"{where}: alpha lies between 0 and 0.5 and most_broken between 0 and 1")
    if len({one.metric for one in plan.metrics}) < len(plan.metrics):
        raise UserError(f"{where}: a metric is asked for twice")
