"""When requests are due in an open loop: a Poisson process, a constant rate, or the times of a trace.

An open loop does not wait for answers, as users do not. What a slow server delays is counted, because a latency begins
at the time that was planned and not when the request could be sent.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepfloor.errors import UserError


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals of a file: seconds from the first, and the lengths that it names, in tokens."""

    at_s: tuple[float, ...]
    input_tokens: tuple[int, ...] | None = None
    output_tokens: tuple[int, ...] | None = None


def poisson(count: int, rate: float, seed: int, burstiness: float = 1.0) -> tuple[float, ...]:
    """Arrivals with independent gaps of mean 1/rate, the first at 0.

    burstiness is the shape of the gaps' gamma distribution, as in vLLM's bench: 1 is Poisson, below 1 comes in bursts.
    """
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count - 1)
    return (0.0, *np.cumsum(gaps).tolist())


def constant(count: int, rate: float) -> tuple[float, ...]:
    """Arrivals every 1/rate seconds, the first at 0."""
    return tuple(index / rate for index in range(count))


def read_trace(path: Path) -> Trace:
    """Read arrivals: a number of seconds a line, or JSON lines with timestamp in ms, input_length and output_length.

    Source: the JSON form is Mooncake's trace format, which AIPerf reads as well. Raises UserError.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the trace {path} ({error}); pass a text file") from None
    try:
        if lines and lines[0].lstrip().startswith("{"):
            rows = [json.loads(line) for line in lines]
            at = [float(row["timestamp"]) / 1000 for row in rows]
            inputs = tuple(int(row["input_length"]) for row in rows) if "input_length" in rows[0] else None
            outputs = tuple(int(row["output_length"]) for row in rows) if "output_length" in rows[0] else None
        else:
            at, inputs, outputs = [float(line) for line in lines], None, None
    except (ValueError, KeyError, TypeError) as error:
        wanted = 'seconds, or JSON like {"timestamp": 1500, "input_length": 512, "output_length": 64} with ms'
        raise UserError(f"the trace {path} wants on every line {wanted}; found {error}") from None
    if not at or at != sorted(at):
        raise UserError(f"the trace {path} wants at least one arrival, in ascending order; found {len(at)} arrivals")
    return Trace(tuple(t - at[0] for t in at), inputs, outputs)
