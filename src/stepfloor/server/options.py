"""From the command line's values to ServeOptions; contradictions are refused by the names of the flags."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepfloor.errors import UserError
from stepfloor.weights.checkpoint import Checkpoint

# what generation_config.json may set for a request that does not
SAMPLING_KEYS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def json_object(flag: str, text: str | None) -> dict[str, Any]:
    """The JSON object that a flag carries; empty without one. Raises UserError for anything else."""
    if text is None:
        return {}
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{flag} wants a JSON object; got {text!r} ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{flag} wants a JSON object; got {text!r}")
    return value


def json_strings(flag: str, text: str) -> tuple[str, ...]:
    """The JSON list of strings that a flag carries. Raises UserError for anything else."""
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UserError(f'{flag} wants a JSON list of strings, like ["*"]; got {text!r}')
    return tuple(value)


def speculation(
    given: int | None, speculative: str | None, has_drafter: bool
) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """Drafts a step, from --spec-tokens, --speculative-config or neither (3 where the checkpoint can draft).

    Also the ranges of sequences with fewer: num_speculative_tokens_per_batch_size, [lowest, highest, drafts] each.
    """
    config = json_object("--speculative-config", speculative)
    known = {"method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "model"}
    unknown = sorted(set(config) - known - {"draft_sample_method"})
    if unknown:
        raise UserError(f"--speculative-config: {', '.join(unknown)} is not supported; leave it out")
    if (method := config.get("method", "mtp")) not in ("mtp", "qwen4_exp_mtp"):
        raise UserError(f"--speculative-config: method {method!r} is not supported; the checkpoint's drafter is mtp")
    if (draws := config.get("draft_sample_method", "probabilistic")) != "probabilistic":
        raise UserError(f"--speculative-config: draft_sample_method {draws!r} is not supported; drafts are sampled")
    count = config.get("num_speculative_tokens")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
        raise UserError(f"--speculative-config: num_speculative_tokens must be an integer; got {count!r}")
    if given is not None and count is not None and given != count:
        raise UserError(f"--spec-tokens is {given} and --speculative-config says {count}; pass one of them")
    chosen = given if given is not None else count
    ranges = config.get("num_speculative_tokens_per_batch_size") or []
    if not isinstance(ranges, list) or not all(
        isinstance(item, list) and len(item) == 3 and all(type(number) is int for number in item) for item in ranges
    ):
        raise UserError(
            "--speculative-config: num_speculative_tokens_per_batch_size must be a list of [lowest, highest, drafts], "
            f"like [[1, 4, 3], [5, 16, 1]]; got {ranges!r}"
        )
    most = (3 if has_drafter else 0) if chosen is None else chosen
    return most, tuple((low, high, drafts) for low, high, drafts in ranges)


def sampling_defaults(checkpoint: Checkpoint, source: str, override: str | None) -> dict[str, float]:
    """Values for requests that bring none: generation_config.json's (source auto), or none (vllm).

    Raises UserError for another source and for keys that are no sampling values.
    """
    if source not in ("auto", "vllm"):
        raise UserError(f"--generation-config must be auto or vllm; got {source!r}")
    own: Mapping[str, Any] = checkpoint.generation_config if source == "auto" else {}
    values = {key: own[key] for key in SAMPLING_KEYS if own.get(key) is not None}
    if own and not own.get("do_sample", True):
        values["temperature"] = 0.0
    given = json_object("--override-generation-config", override)
    if unknown := sorted(set(given) - set(SAMPLING_KEYS)):
        raise UserError(f"--override-generation-config: {', '.join(unknown)} is no sampling value of a request")
    values |= given
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"{key} must be a number; found {value!r}")
    return values


def profile_directory(text: str | None) -> Path | None:
    """Where --profiler-config wants the traces."""
    config = json_object("--profiler-config", text)
    if not config:
        return None
    if (kind := config.get("profiler", "torch")) != "torch":
        raise UserError(f"--profiler-config: profiler {kind!r} is not supported; torch is")
    if not isinstance(config.get("torch_profiler_dir"), str):
        raise UserError("--profiler-config needs torch_profiler_dir, the directory for the traces")
    return Path(config["torch_profiler_dir"])


def formats_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Stored format of each group of modules."""
    return {row.group: row.format for row in checkpoint.precisions}
