"""stepfloor generate: one prompt in, text out as it comes, and how far the steps were from the floor."""

import json
import sys
import time
from dataclasses import asdict, dataclass

from stepfloor.config import EngineConfig
from stepfloor.engine import Engine
from stepfloor.errors import UserError
from stepfloor.model.load import is_small
from stepfloor.request import Request, SamplingParams
from stepfloor.roofline.floor import Floor, checkpoint_step_bytes
from stepfloor.tokenizer.tokenizer import Tokenizer
from stepfloor.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to continue: text, or token ids; chat wraps the text in one user turn of the model's template."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: bool = False
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a run produced and how fast; the keys of --json.

    prompt_tokens, tokens   counts
    first_token_s           from the start of the run (weights loaded) to the first piece
    tokens_per_s, ms_per_step   over the decode steps, the prompt left out
    delivered_per_step      tokens over verification steps
    accepted_per_position   share of the drafts at each position that were accepted
    bytes_per_step          the byte model's, for this checkpoint; bandwidth_gbps  read, measured in this run
    fraction_of_floor       bytes over bandwidth, over the time of a step
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    prompt_tokens: int
    tokens: int
    first_token_s: float
    tokens_per_s: float | None
    ms_per_step: float | None
    delivered_per_step: float | None
    accepted_per_position: tuple[float, ...]
    bytes_per_step: float
    bandwidth_gbps: float
    fraction_of_floor: float | None

    def line(self) -> str:
        """The one line that ends a run."""
        if self.tokens_per_s is None or self.ms_per_step is None or self.fraction_of_floor is None:
            return f"{self.tokens} tokens, too few decode steps to time"
        accepted = " ".join(f"{share:.2f}" for share in self.accepted_per_position) or "no drafts"
        return (
            f"{self.tokens} tokens, {self.tokens_per_s:#.3g} tokens/s, {self.ms_per_step:.2f} ms/step, "
            f"{self.delivered_per_step:.2f} delivered a step, accepted {accepted}, "
            f"{self.bytes_per_step / 1e6:.1f} MB a step, {100 * self.fraction_of_floor:.1f} % of the floor at "
            f"{self.bandwidth_gbps:.1f} GB/s"
        )


def generate(
    checkpoint: Checkpoint,
    config: EngineConfig,
    prompt: Prompt,
    sampling: SamplingParams,
    max_tokens: int,
    ignore_eos: bool = False,
    as_json: bool = False,
) -> None:
    """Print the continuation as it is generated, then the report. Raises UserError for what cannot run."""
    tokenizer = _tokenizer(checkpoint, prompt)
    token_ids = _token_ids(prompt, tokenizer)
    engine = _load(checkpoint, config, tokenizer)
    stops = () if ignore_eos else checkpoint.stop_token_ids
    engine.submit(Request("generate", token_ids, sampling, max_tokens, stops))
    report = _run(engine, checkpoint, len(token_ids))
    if as_json:
        print(json.dumps(asdict(report), ensure_ascii=False))
    else:
        print(report.line(), file=sys.stderr)  # standard output holds the text alone, so that it can be piped


def _load(checkpoint: Checkpoint, config: EngineConfig, tokenizer: Tokenizer | None) -> Engine:
    if is_small(checkpoint):
        return Engine(checkpoint, config, tokenizer)  # a tenth of a second; the bar would take longer to import
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading layers", total=checkpoint.config.num_hidden_layers)

        def on_layer(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        return Engine(checkpoint, config, tokenizer, on_layer)


def _run(engine: Engine, checkpoint: Checkpoint, prompt_tokens: int) -> Report:
    token_ids: list[int] = []
    texts: list[str] = []
    finish_reason = None
    start = time.perf_counter()
    times: list[float] = []
    for piece in engine.run():
        times.append(time.perf_counter())
        token_ids.extend(piece.token_ids)
        texts.append(piece.text)
        finish_reason = piece.finish_reason or finish_reason
        print(piece.text if engine.tokenizer else "".join(f"{i} " for i in piece.token_ids), end="", flush=True)
    print()
    if finish_reason == "error":
        raise UserError(f"the model gave logits that are not finite after {len(token_ids)} tokens; check the weights")
    counters, spec_tokens = engine.counters, engine.config.spec_tokens
    context = prompt_tokens + len(token_ids) // 2
    step = checkpoint_step_bytes(checkpoint.config, checkpoint.weights, 1, spec_tokens, context)
    bandwidth = engine.bandwidth_gbps
    timed = counters.decode_steps > 1 and len(times) > 1
    # the first piece is the prompt's; the loop is one step ahead, so between two pieces lies one step
    step_s = (times[-1] - times[0]) / (len(times) - 1) if timed else None
    return Report(
        text="".join(texts),
        token_ids=tuple(token_ids),
        finish_reason=finish_reason,
        prompt_tokens=prompt_tokens,
        tokens=len(token_ids),
        first_token_s=times[0] - start,
        tokens_per_s=counters.delivered_per_step / step_s if step_s else None,
        ms_per_step=step_s * 1e3 if step_s else None,
        delivered_per_step=counters.delivered_per_step if counters.decode_steps else None,
        accepted_per_position=tuple(counters.acceptance()),
        bytes_per_step=step.total,
        bandwidth_gbps=bandwidth,
        fraction_of_floor=Floor(step, bandwidth).fraction(step_s * 1e6) if step_s else None,
    )


def _tokenizer(checkpoint: Checkpoint, prompt: Prompt) -> Tokenizer | None:
    if prompt.token_ids is not None and not (checkpoint.directory / "tokenizer.json").is_file():
        return None
    return Tokenizer.load(checkpoint.directory)


def _token_ids(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if prompt.token_ids is not None:
        if prompt.text is not None or prompt.chat:
            raise UserError("--token-ids is the whole prompt; pass no text and no --chat beside it")
        return prompt.token_ids
    if prompt.text is None or tokenizer is None:
        raise UserError("wanted a prompt; pass --prompt TEXT, --token-ids 1,2,3 or text on standard input")
    text = prompt.text
    if prompt.chat:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=prompt.thinking)
    return tuple(tokenizer.encode(text))


def parse_token_ids(text: str) -> tuple[int, ...]:
    """Ids of a comma-separated list. Raises UserError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--token-ids wants integers with commas between, like 1,2,3; got {text!r}") from None


def sampling_from(
    checkpoint: Checkpoint, temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None
) -> SamplingParams:
    """The checkpoint's own sampling settings, with those that were given in their place."""
    own = checkpoint.generation_config
    own_temperature = own.get("temperature", 1.0) if own.get("do_sample", True) else 0.0
    return SamplingParams(
        temperature=own_temperature if temperature is None else temperature,
        top_p=own.get("top_p", 1.0) if top_p is None else top_p,
        top_k=own.get("top_k", 0) if top_k is None else top_k,
        seed=seed,
    )
