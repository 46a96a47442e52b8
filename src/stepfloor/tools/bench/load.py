"""A load: every parameter that decides which bytes are sent when. The same load sends the same bytes."""

import difflib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from stepfloor.errors import UserError
from stepfloor.tools.bench import arrivals
from stepfloor.tools.bench.metrics import parse_slo
from stepfloor.tools.bench.prompts import KINDS, Lengths, Prompt, PromptPlan

ARRIVALS = ("closed", "poisson", "constant", "trace")
ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# what the checkpoint's generation_config.json says
MODEL_SAMPLING = {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
SAMPLING = {"model": MODEL_SAMPLING, "greedy": {"temperature": 0.0}, "server": {}}
# requests of a duration are made beforehand, for a server that answers so many a second and user at most
DURATION_RATE = 4
# seeds of requests: one for each index of a load
SEED_SPAN = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """What to send.

    route         completions or chat
    dataset_name  a kind of prompts.KINDS; dataset_path for sharegpt and jsonl
    input_len, output_len    tokens, as prompts.Lengths reads them; output_len None takes the file's own
    prefix_share  share of each prompt that is the same in all
    num_prompts   measured requests; None: 8 for each of the concurrency, at least 16, or the whole trace
    concurrency   requests in flight in a closed loop; in an open loop the most that may be, None any number
    duration_s    a closed loop ends after so many seconds, not after num_prompts
    arrivals      closed, poisson, constant (both with request_rate, a second) or trace (with trace_file)
    num_warmups   requests before the window, with other prompts; None: one for each of the concurrency, at least 2
    sampling      model (what the checkpoint says), greedy, server (nothing is sent) or a JSON object
    plain         send no field that OpenAI does not know: answers then end where they will
    goodput       limits in ms: "ttft:500 tpot:50"
    """

    route: str = "completions"
    dataset_name: str = "random"
    dataset_path: str | None = None
    input_len: str = "512"
    output_len: str | None = "128"
    prefix_share: float = 0.0
    num_prompts: int | None = None
    concurrency: int | None = None
    duration_s: float | None = None
    arrivals: str = "closed"
    request_rate: float | None = None
    burstiness: float = 1.0
    trace_file: str | None = None
    num_warmups: int | None = None
    seed: int = 0
    sampling: str = "model"
    ignore_eos: bool = True
    plain: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    goodput: str = ""
    model: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    timeout_s: float = 600.0

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "Load":
        """A load from a table of a plan file. Raises UserError for a key that there is not."""
        known = [f.name for f in fields(cls)]
        for name in raw:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise UserError(
                    f"a load has no {name!r}; "
                    + (f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}")
                )
        return cls(**raw)

    def resolve(self) -> "Load":
        """The same load with nothing left open. Raises UserError for values that cannot be, or not together."""
        self._check()
        closed = self.arrivals == "closed"
        concurrency = (self.concurrency or 1) if closed else self.concurrency
        users = concurrency or 1
        if self.num_prompts is not None:
            count = self.num_prompts
        elif self.arrivals == "trace":
            count = len(arrivals.read_trace(Path(self.trace_file or "")).at_s)
        elif self.duration_s is not None:
            count = max(16, round(users * DURATION_RATE * self.duration_s))
        else:
            count = max(16, 8 * users)
        warm_ups = max(2, users) if self.num_warmups is None else self.num_warmups
        return replace(self, num_prompts=count, concurrency=concurrency, num_warmups=warm_ups)

    def sampling_values(self) -> dict[str, Any]:
        """The sampling fields that are sent."""
        if self.sampling in SAMPLING:
            return dict(SAMPLING[self.sampling])
        try:
            raw = json.loads(self.sampling)
        except ValueError:
            raw = None
        if not isinstance(raw, dict):
            raise UserError(f"--sampling is model, greedy, server or a JSON object; got {self.sampling!r}")
        return raw

    def prompt_plan(self) -> PromptPlan:
        """The prompts of it."""
        trace = arrivals.read_trace(Path(self.trace_file)) if self.trace_file else None
        return PromptPlan(
            self.dataset_name,
            self.route == "chat",
            self.seed,
            Lengths.parse(self.input_len, "--input-len"),
            None if self.output_len is None else Lengths.parse(self.output_len, "--output-len"),
            self.prefix_share,
            None if self.dataset_path is None else Path(self.dataset_path),
            None if trace is None else trace.input_tokens,
            None if trace is None else trace.output_tokens,
        )

    def arrival_times(self) -> tuple[float, ...]:
        """Seconds from the window's begin, of an open loop that is resolved."""
        count, rate = self.num_prompts or 0, self.request_rate or 0.0
        if self.arrivals == "poisson":
            return arrivals.poisson(count, rate, self.seed, self.burstiness)
        if self.arrivals == "constant":
            return arrivals.constant(count, rate)
        return arrivals.read_trace(Path(self.trace_file or "")).at_s[:count]

    def body(self, prompt: Prompt, index: int, model: str, server: str | None) -> bytes:
        """The request's body; fields in one order, so that the same load sends the same bytes."""
        fields_sent: dict[str, Any] = {"model": model, "stream": True}
        fields_sent["messages" if self.route == "chat" else "prompt"] = prompt.value
        fields_sent["stream_options"] = {"include_usage": True}
        values = self.sampling_values()
        if self.plain:
            values.pop("top_k", None)
            fields_sent["max_completion_tokens" if self.route == "chat" else "max_tokens"] = prompt.output_tokens
        else:
            fields_sent["max_tokens"] = prompt.output_tokens
            fields_sent["ignore_eos"] = self.ignore_eos
            # the server's own count in every chunk: tokens inside a window cannot be counted otherwise
            fields_sent["stream_options"]["continuous_usage_stats"] = True
            if server == "llamacpp":
                fields_sent["timings_per_token"] = True
        return json.dumps({**fields_sent, **values, "seed": self.seed * SEED_SPAN + index, **self.extra_body}).encode()

    def stored(self) -> dict[str, Any]:
        """As a result keeps it: with the values that names stand for, and the contents of files by their hash."""
        stored: dict[str, Any] = {**asdict(self), "sampling_values": self.sampling_values()}
        for name, path in (("dataset_path", self.dataset_path), ("trace_file", self.trace_file)):
            if path is not None:
                stored[f"{name}_sha256"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        return stored

    def _check(self) -> None:
        for name, value, allowed in (
            ("route", self.route, tuple(ROUTES)),
            ("dataset-name", self.dataset_name, KINDS),
            ("arrivals", self.arrivals, ARRIVALS),
        ):
            if value not in allowed:
                raise UserError(f"--{name} is one of {', '.join(allowed)}; got {value!r}")
        for name in (
            "num_prompts",
            "concurrency",
            "duration_s",
            "request_rate",
            "vocab_size",
            "timeout_s",
            "burstiness",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:  # NaN fails too
                raise UserError(f"--{name.removesuffix('_s').replace('_', '-')} must be more than 0; got {value}")
        if self.duration_s == math.inf or self.burstiness == math.inf:
            raise UserError("--duration and --burstiness must be finite; got inf")
        if not 0 <= self.prefix_share <= 1:
            raise UserError(f"--prefix-share is a share from 0 to 1; got {self.prefix_share}")
        if self.seed < 0:
            raise UserError(f"--seed must not be negative; got {self.seed}")
        if (self.num_warmups or 0) < 0:
            raise UserError(f"--num-warmups must not be negative; got {self.num_warmups}")
        if self.arrivals in ("poisson", "constant") and self.request_rate is None:
            raise UserError(f"--arrivals {self.arrivals} wants --request-rate in requests a second")
        if self.arrivals == "trace" and self.trace_file is None:
            raise UserError("--arrivals trace wants --trace-file")
        if self.request_rate is not None and self.arrivals not in ("poisson", "constant"):
            raise UserError(f"--request-rate goes with --arrivals poisson or constant; got --arrivals {self.arrivals}")
        if self.duration_s is not None and self.arrivals != "closed":
            raise UserError("--duration goes with a closed loop; pass --num-prompts for an open one")
        if self.arrivals == "trace" and self.num_prompts is not None:
            longest = len(arrivals.read_trace(Path(self.trace_file or "")).at_s)
            if self.num_prompts > longest:
                raise UserError(f"the trace has {longest} arrivals; got --num-prompts {self.num_prompts}")
        parse_slo(self.goodput)
        self.sampling_values()
        self.prompt_plan()
