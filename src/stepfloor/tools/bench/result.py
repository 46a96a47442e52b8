"""What a measurement leaves behind: one JSON file that says what was asked, of whom, what came, and whether it counts.

A file of one result is a JSON object; a file of several (the cells of a matrix) has one such object a line. All times
of requests and of telemetry are seconds since the measured window began. Absent is null, and never zero.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import stepfloor
from stepfloor.errors import UserError

FORMAT = "stepfloor.bench/1"
Kind = Literal["serve", "matrix cell", "accuracy", "imported"]

# A result with one of these flags is no measurement of what it says it measures.
INVALID_CODES = {
    "partial": "the run was stopped before its end",
    "no_requests": "no request was measured",
    "errors": "requests failed",
    "underfilled": "fewer requests were in flight than the concurrency asked for",
    "repetition_loop": "answers repeat themselves without end, which is the fastest text there is",
    "early_stop": "answers ended before the length that was asked for",
    "usage_missing": "the server did not say how many tokens it made",
    "other_clients": "the server made more tokens than this client was sent",
    "first_runs_differ": "the first requests were slower or faster than the rest, more than chance explains",
    "does_not_fit": "prompt and answer are longer than the model's context",
    "prompt_tokens_differ": "prompts had other lengths than those asked for",
    "cached_prompts": "prompts that should be new were in the server's cache",
    "repeated_prompts": "a prompt was measured more than once",
    "client_overloaded": "this client was too slow, so the times are its own",
}
# These are worth knowing, and do not spoil the numbers.
NOTE_CODES = {
    "warm_up": "requests that ran before the window and are not in it",
    "ramp": "the first wave of requests was slower or faster than the rest",
    "few_loops": "some answers repeat themselves, too few to spoil the whole",
    "config_missing": "the server's configuration is not known: not for a comparison",
    "caches_seen": "the server says that it answered part of the prompts from a cache",
    "inexact_prompts": "prompt lengths could not be made exact here",
    "clock_throttle": "the GPU's clocks were held down",
    "late_arrivals": "requests were sent later than planned",
    "sampling_unknown": "the server's own sampling values were used and are not known",
    "server_metrics_missing": "the server has no metrics page that could be read",
    "short": "too few requests for a percentile that is given",
    "plan_unknown": "the imported file does not say whether requests were planned ahead: latencies count from sending",
    "records_disagree": "the imported file's figures are not those that its own requests give",
    "unmapped": "the imported file holds values that have no place here",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """Something that a reader of the numbers must know; code is a key of INVALID_CODES or of NOTE_CODES."""

    code: str
    text: str

    def __post_init__(self) -> None:
        if self.code not in INVALID_CODES and self.code not in NOTE_CODES:
            raise ValueError(f"a flag's code is one of {', '.join((*INVALID_CODES, *NOTE_CODES))}; got {self.code!r}")

    @property
    def invalidates(self) -> bool:
        """Whether the result does not count because of it."""
        return self.code in INVALID_CODES


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a result.

    stats      {"value": x} for a rate or a ratio; for a distribution mean, std, min, p50, p90, p95, p99, max; for
               acceptance_per_position "0", "1", ...
    intervals  of some of stats: the ends of the 95 % bootstrap interval
    count      samples it was made from, where there are any
    """

    unit: str
    stats: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    count: int | None = None

    @property
    def headline(self) -> str:
        """The statistic that stands for the metric where one number is wanted."""
        return next(name for name in ("value", "mean", "p50", *self.stats) if name in self.stats)

    @property
    def value(self) -> float:
        """The headline's number."""
        return self.stats[self.headline]

    @property
    def low(self) -> float | None:
        """Lower end of the headline's interval."""
        return self.intervals[self.headline][0] if self.headline in self.intervals else None

    @property
    def high(self) -> float | None:
        """Upper end of the headline's interval."""
        return self.intervals[self.headline][1] if self.headline in self.intervals else None


@dataclass(frozen=True, slots=True)
class Request:
    """What one measured request was and got. Times are seconds since the window began; tokens are the server's count.

    planned_s  when it should have been sent: latency in an open loop counts from here
    first_s    arrival of the first generated token of any kind: text, reasoning or a part of a tool call
    last_s     arrival of the last one
    chunk_s    arrivals of all chunks that brought something generated, where they were kept
    chunk_tokens  tokens that had come with each of chunk_s, where the server counts them in every chunk
    cut        whether the window's end stopped it; what came before counts
    """

    index: int
    planned_s: float
    sent_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    end_s: float | None = None
    chunks: int | None = None
    chunk_s: tuple[float, ...] | None = None
    chunk_tokens: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    asked_prompt_tokens: int | None = None
    asked_output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    prompt_hash: str | None = None
    output_hash: str | None = None
    looped: bool = False
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """One question of an accuracy profile: what was answered, and whether that is right."""

    id: str
    correct: bool
    answer: str | None = None
    expected: str | None = None
    error: str | None = None
    looped: bool = False
    output_tokens: int | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU through the window: columns (sm_clock_mhz, temperature_c, power_w, ...) have one value for each of at_s."""

    name: str
    at_s: tuple[float, ...] = ()
    columns: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What the machine did meanwhile. unavailable says why there are no devices; nothing seen is not zero."""

    source: str | None = None
    unavailable: str | None = None
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """Who answered. server, server_version and config are what it told of itself."""

    url: str
    model: str
    server: str | None = None
    server_version: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement.

    load       every parameter of the load, resolved, seeds included: the same load sends the same bytes
    window_s   length of the measured window
    server     what the server's metrics page said of the window: source, and the growth of its counters
    origin     for an imported result: the tool and the file it came from
    """

    kind: Kind
    target: Target
    load: Mapping[str, Any]
    metrics: Mapping[str, Metric]
    flags: tuple[Flag, ...] = ()
    requests: tuple[Request, ...] = ()
    items: tuple[Item, ...] = ()
    telemetry: Telemetry | None = None
    server: Mapping[str, Any] | None = None
    window_s: float | None = None
    origin: Mapping[str, Any] | None = None
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    version: str = stepfloor.__version__

    @property
    def valid(self) -> bool:
        """Whether the numbers mean what their names say."""
        return not any(flag.invalidates for flag in self.flags)

    def json(self) -> str:
        """The result on one line."""
        return json.dumps({"format": FORMAT, "valid": self.valid, **asdict(self)}, allow_nan=False)

    def write(self, path: Path) -> None:
        """Write the file of this one result, whole or not at all."""
        write_results(path, [self])

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Read a file of one result. Raises UserError for one that this version cannot read, or that holds several."""
        results = read_results(path)
        if len(results) != 1:
            raise UserError(f"{path} holds {len(results)} results, and one is wanted; pass a file of one")
        return results[0]


def write_results(path: Path, results: Sequence[Result]) -> None:
    """Write results, one a line, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text("".join(result.json() + "\n" for result in results), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; pass a path in a directory that is yours") from None


def read_results(path: Path) -> tuple[Result, ...]:
    """Read a file of one result or of several. Raises UserError that says what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({error}); pass a file that `stepfloor bench` wrote") from None
    try:
        try:
            raws = [json.loads(text)]
        except json.JSONDecodeError:
            raws = [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); pass a file that `stepfloor bench` wrote") from None
    if not raws:
        raise UserError(f"{path} holds no result; pass a file that `stepfloor bench` wrote")
    return tuple(_decode(raw, str(path)) for raw in raws)


def _decode(raw: Any, where: str) -> Result:
    from pydantic import ValidationError

    found = raw.get("format") if isinstance(raw, dict) else None
    if found != FORMAT:
        what = f"has the format {found!r}" if found is not None else "names no format"
        newer = isinstance(found, str) and found.startswith("stepfloor.bench/")
        todo = "update stepfloor" if newer else "import it with `stepfloor bench import` if another tool wrote it"
        raise UserError(f"{where} {what}, and this version reads {FORMAT!r}; {todo}")
    valid = raw.pop("valid", None)
    del raw["format"]
    try:
        result = _reader().validate_json(json.dumps(raw), strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the top"
        if first["type"] == "unexpected_keyword_argument":
            raise UserError(
                f"{where} holds {place}, which this version ({stepfloor.__version__}) does not know; "
                f"it was written by {raw.get('version')}: update stepfloor"
            ) from None
        raise UserError(f"{where} is damaged at {place}: {first['msg']}; measure again") from None
    if valid != result.valid:
        raise UserError(f"{where} says valid: {valid}, and its flags say {result.valid}; it was edited: measure again")
    return result


def _reader() -> Any:
    # imported here: a client that only measures starts without it
    from pydantic import TypeAdapter

    return TypeAdapter(Result)
