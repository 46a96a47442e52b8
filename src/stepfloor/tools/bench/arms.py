"""Arms proven equal except for the variable: how each server is started, taken apart and compared.

Both arms get this process's environment; what they add to it, their words, program and directory are compared. What
differs must be what the plan names, no more and no less.
"""

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepfloor.errors import UserError
from stepfloor.tools.bench.plan import ArmPlan, Plan

# Variables that decide how a server runs. Others are not kept: an environment is full of secrets and of this machine.
_TELLING = re.compile(
    r"(CUDA|CUDNN|CUBLAS|NVIDIA|NCCL|OMP|MKL|OPENBLAS|VLLM|SGLANG|STEPFLOOR|GGML|LLAMA|TORCH|PYTORCH|TRITON|HF_HUB|"
    r"TRANSFORMERS|LMCACHE|FLASHINFER|HIP|ROCR)_"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL|AUTH", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same in all arms; absent is None."""

    name: str
    values: Mapping[str, str | None]

    def __str__(self) -> str:
        said = (f"{arm}: {'absent' if value is None else value}" for arm, value in self.values.items())
        return f"{self.name} ({', '.join(said)})"


def properties(arm: ArmPlan) -> dict[str, str]:
    """What an arm consists of, by name: flags with their values, env:NAME, program, cwd; config:NAME for a URL."""
    if arm.url is not None:
        return {f"config:{name}": value for name, value in arm.config.items()}
    found = {"program": arm.command[0], "cwd": arm.cwd or "."}
    found |= _words(arm.command[1:])
    found |= {f"env:{name}": value for name, value in arm.env.items()}
    return found


def _words(words: Sequence[str]) -> dict[str, str]:
    """Flags and what follows them; words that follow no flag are argument 1, 2, ...

    Whether a flag takes a value is not known here, so the next word counts as one unless it is a flag itself. That may
    name a word wrongly, but hides no difference; only the order of different flags does not count.
    """
    found: dict[str, list[str]] = {}
    plain, i = 0, 0
    while i < len(words):
        word = words[i]
        i += 1
        if not _is_flag(word):
            plain += 1
            found[f"argument {plain}"] = [word]
            continue
        name, equals, value = word.partition("=")
        if not equals and i < len(words) and not _is_flag(words[i]):
            value = words[i]
            i += 1
        found.setdefault(name, []).append(value)
    return {name: shlex.join(values) for name, values in found.items()}


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d*)?", word)


def differences(arms: Sequence[ArmPlan]) -> tuple[Difference, ...]:
    """Everything that is not the same in all arms."""
    taken = {arm.name: properties(arm) for arm in arms}
    names = sorted({name for found in taken.values() for name in found})
    return tuple(
        Difference(name, {arm: found.get(name) for arm, found in taken.items()})
        for name in names
        if len({found.get(name) for found in taken.values()}) > 1
    )


def check_arms(plan: Plan) -> tuple[Difference, ...]:
    """What differs. Raises UserError unless that is exactly the plan's variable, and no two arms are the same."""
    found = differences(plan.arms)
    if plan.null:
        return found
    if not plan.variable:
        raise UserError("the plan names no variable: say what may differ between the arms, like variable = '--x'")
    undeclared = [one for one in found if one.name not in plan.variable]
    if undeclared:
        raise UserError(
            f"the arms differ in more than {', '.join(plan.variable)}: {'; '.join(map(str, undeclared))}; make them "
            "equal or name this as the variable, for otherwise nobody knows what made the difference"
        )
    same = [name for name in plan.variable if name not in {one.name for one in found}]
    if same:
        raise UserError(
            f"{', '.join(same)} is to vary and is the same in all arms; pass --null to compare an arm with itself"
        )
    taken = [properties(arm) for arm in plan.arms]
    for i, one in enumerate(taken):
        if one in taken[:i]:
            raise UserError(f"arms {plan.names[taken.index(one)]} and {plan.names[i]} are the same")
    return found


def check_programs(plan: Plan, directory: Path, search_path: str | None) -> None:
    """Raises UserError for a program or a directory that is not there: better now than in the third round."""
    for arm in plan.arms:
        if not arm.command:
            continue
        if arm.command[0] != "{python}" and shutil.which(arm.command[0], path=search_path) is None:
            raise UserError(f"arm {arm.name} wants to run {arm.command[0]!r}, which is not on the path; install it")
        if not (directory / (arm.cwd or ".")).is_dir():
            raise UserError(f"arm {arm.name} wants to run in {arm.cwd!r}, which is no directory beside the plan")


def telling(environment: Mapping[str, str]) -> dict[str, str]:
    """The inherited variables that decide how a server runs, without secrets."""
    return {
        name: value for name, value in sorted(environment.items()) if _TELLING.match(name) and not _SECRET.search(name)
    }
