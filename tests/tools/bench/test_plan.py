"""Plans: read strictly, ordered so that drift cancels, and refused where the arms are not what they should be."""

import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepfloor.errors import UserError
from stepfloor.tools.bench.arms import check_arms, check_programs, differences, properties, telling
from stepfloor.tools.bench.load import Load
from stepfloor.tools.bench.plan import ArmPlan, Plan, order_of, orders
from stepfloor.tools.bench.plan_file import parse_plan, read_plan
from stepfloor.tools.bench.questions import load_profile
from stepfloor.tools.bench.verdict import Asked, Margin

PLAN = """
name = "drafts"
variable = "--spec-tokens"
rounds = { least = 4, most = 12 }
noise = "2 %"
[base]
command = ["{python}", "-m", "stepfloor", "serve", "--port", "{port}"]
env = { OMP_NUM_THREADS = "1" }
[arms.k0]
switches = { "--spec-tokens" = 0 }
[arms.k3]
switches = { "--spec-tokens" = 3 }
[[metrics]]
name = "output_throughput"
margin = "2 %"
[[metrics]]
name = "ttft_ms.p99"
[load]
concurrency = 4
"""


def plan(**changes: Any) -> Plan:
    return parse_plan({**tomllib.loads(PLAN), **changes})


def test_a_plan_is_what_it_says() -> None:
    found = plan()
    assert found.names == ("k0", "k3")
    assert found.arms[1].command[-2:] == ("--spec-tokens", "3")
    assert found.metrics == (Asked("output_throughput", True, Margin(2.0, True)), Asked("ttft_ms.p99", False))
    assert (found.least, found.most, found.looks) == (4, 12, (4, 6, 8, 10, 12))
    assert found.digest == plan().digest != plan(seed=1).digest


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("round = 12", r"plan.toml has no 'round'; did you mean 'rounds'\?"),
        ("rounds = 5", "multiples of 2"),
        ("rounds = 2", "at least 4"),
        ("rounds = true", "rounds must be int or dict; got True"),
        ('alpha = "five"', "alpha must be float; got 'five'"),
        ("[arms.k0]\ncommands = ['x']", r"\[arms.k0\] has no 'commands'; did you mean 'command'\?"),
        ("[health]\nroutes = '/x'", r"\[health\] has no 'routes'; did you mean 'route'\?"),
        ("[[metrics]]\nname = 'my_metric'", 'needs better = "higher" or "lower"'),
        ("[[metrics]]\nname = 'itl_ms'\nmargin = 'small'", "a margin is a size above zero"),
        ("[arms.k0]\ncommand = ['server']", "must be told its port"),
        ("[arms.k0]\nurl = 'http://h:1'\ncommand=[]", "nobody can see how its server was started"),
        ("[arms.only]\ncommand = ['x', '{port}']", "needs two arms; it has 1"),
        ("x = ", "not TOML"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    """An unknown key that is passed over is an arm, a gate or a margin that never was."""
    arms = "" if "arms" in text else '[arms.a]\ncommand=["x", "{port}"]\n[arms.b]\ncommand=["y", "{port}"]\n'
    if "k0" in text:
        arms = '[arms.k3]\ncommand=["x", "{port}"]\n'
    file = tmp_path / "plan.toml"
    file.write_text(f"{text}\n{arms}" if "[" not in text else f"{arms}\n{text}\n")
    with pytest.raises(UserError, match=sentence):
        read_plan(file)


def test_what_can_be_seen_is_said_beforehand() -> None:
    """Twelve rounds at 2 % noise: the differences spread by 2.83 %, and t at 10 degrees of freedom finds 2.5 %."""
    fixed = plan(rounds=12, metrics=[{"name": "output_throughput"}])
    assert (
        "12 rounds of k0 and k3; with noise of 2 % a run, differences of 2.5 % or more are found 80%" in fixed.stated()
    )
    # looks cost a little, two metrics more
    assert "differences of 2.6 % or more" in plan(metrics=[{"name": "output_throughput"}]).stated()
    assert "differences of 3.0 % or more" in plan().stated()


def test_the_order_cancels_drift() -> None:
    """The case of identical arms on a machine that gets slower: 100, 99, ..., 93."""
    speeds = [100.0 - i for i in range(8)]

    def means(order: list[int]) -> tuple[float, float]:
        return tuple(float(np.mean([s for s, arm in zip(speeds, order, strict=True) if arm == a])) for a in (0, 1))  # type: ignore[return-value]

    assert means([0] * 4 + [1] * 4) == (98.5, 94.5)
    assert means([0, 1] * 4) == (97.0, 96.0)
    assert means([arm for round_ in range(4) for arm in order_of(round_, 2)]) == (96.5, 96.5)


@pytest.mark.parametrize("arms", [2, 3, 4, 5, 8])
def test_orders_are_balanced(arms: int) -> None:
    """Each arm in each place equally often, and after each other arm equally often."""
    square = orders(arms)
    assert len(square) == (arms if arms % 2 == 0 else 2 * arms)
    assert all(sorted(row) == list(range(arms)) for row in square)
    places = {(arm, place): 0 for arm in range(arms) for place in range(arms)}
    follows = {(a, b): 0 for a in range(arms) for b in range(arms) if a != b}
    for row in square:
        for place, arm in enumerate(row):
            places[arm, place] += 1
        for pair in pairwise(row):
            follows[pair] += 1
    assert len(set(places.values())) == 1
    assert len(set(follows.values())) == 1


def test_arms_differ_in_the_variable_alone() -> None:
    assert [str(one) for one in check_arms(plan())] == ["--spec-tokens (k0: 0, k3: 3)"]
    arms = tomllib.loads(PLAN)["arms"]
    with pytest.raises(UserError, match=r"differ in more than --spec-tokens: env:X \(k0: absent, k3: 1\)"):
        check_arms(plan(arms={**arms, "k3": {**arms["k3"], "env": {"X": "1"}}}))
    with pytest.raises(UserError, match="--spec-tokens is to vary and is the same"):
        check_arms(plan(arms={"a": arms["k0"], "b": arms["k0"]}))
    with pytest.raises(UserError, match="arms k3 and again are the same"):
        check_arms(plan(arms={**arms, "again": arms["k3"]}, rounds=6))
    with pytest.raises(UserError, match="names no variable"):
        check_arms(plan(variable=[]))
    assert check_arms(plan().against_itself()) == ()


def test_commands_are_taken_apart() -> None:
    """--x=1 is --x 1; a switch without a value, a negative number, and repeated flags."""
    found = properties(
        ArmPlan("a", ("server", "model", "--x=1", "--on", "--bias", "-2", "--k", "a", "--k", "b c"), {"E": "1"})
    )
    assert found == {
        "program": "server", "cwd": ".", "argument 1": "model", "--x": "1", "--on": "''", "--bias": "-2",
        "--k": "a 'b c'", "env:E": "1",
    }  # fmt: skip
    one, other = ArmPlan("a", ("s", "--x", "1")), ArmPlan("b", ("s", "--x=1"))
    assert differences((one, other)) == ()


def test_secrets_stay_out_of_the_report() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0", "HF_HUB_TOKEN": "x", "VLLM_API_KEY": "y", "HOME": "/h", "OMP_X": "1"}
    assert telling(environment) == {"CUDA_VISIBLE_DEVICES": "0", "OMP_X": "1"}


def test_what_is_not_there_is_said_before_the_first_round(tmp_path: Path) -> None:
    arm = {"command": ["no-such-server", "--port", "{port}"]}
    with pytest.raises(UserError, match="'no-such-server', which is not on the path"):
        check_programs(plan(base=arm), tmp_path, "/usr/bin")
    with pytest.raises(UserError, match="no directory beside the plan"):
        check_programs(plan(base={"command": ["{python}", "{port}"], "cwd": "nowhere"}), tmp_path, "/usr/bin")


def test_the_documented_plan_is_a_plan() -> None:
    """An example that nobody runs is soon wrong."""
    page = (Path(__file__).parents[3] / "docs" / "bench-ab.md").read_text(encoding="utf-8")
    found = parse_plan(tomllib.loads(page.split("```toml\n")[1].split("```")[0]))
    assert [one.name for one in check_arms(found)] == ["--spec-tokens"]
    assert found.accuracy is not None
    Load.of(found.load).resolve()
    load_profile(found.accuracy.profile, None, found.accuracy.options["items"])


def test_the_plans_that_ship_are_plans() -> None:
    for path in sorted((Path(__file__).parents[3] / "benchmarks" / "plans").glob("*.toml")):
        found = read_plan(path)
        check_arms(found)
        Load.of(found.load).resolve()
