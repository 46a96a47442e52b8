"""Train the small model that ships: corpus, tokenizer, network, files, in one command.

    python -m demo.train --out DIRECTORY --minutes 8

The learning rate follows the clock, not a number of steps, so the run ends by itself inside --minutes on any
machine, and every quarter of the time leaves a complete model in DIRECTORY.
"""

import argparse
import json
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demo.batches import Batches
from demo.chat import Conversations
from demo.corpus import Corpus, collect
from demo.evaluate import evaluate, held_out
from demo.forward import Mode, Network
from demo.losses import Losses, losses
from demo.optimizer import Optimizer
from demo.tokenizer import END_OF_TEXT, TURN_END, save_tokenizer, train_tokenizer
from demo.weights import Weights, initial, save
from stepfloor.config import ModelConfig
from stepfloor.tokenizer.tokenizer import Tokenizer

MAX_BYTES = 24_000_000
_EVALUATION_S = 40  # kept free at the end for the last evaluation and the files
_DENSE_SHARE = 0.3  # of the time in which sparse attention keeps every block and the indexer learns from all
_SHIPPED = Path(__file__).parent.parent / "src" / "stepfloor" / "shipped" / "config.json"
_GENERATION = {
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 20,
    "top_p": 0.95,
    "bos_token_id": END_OF_TEXT,
    "pad_token_id": END_OF_TEXT,
    "eos_token_id": [TURN_END, END_OF_TEXT],
}


def main() -> None:
    arguments = _arguments()
    started = time.monotonic()
    out: Path = arguments.out
    device = torch.device(arguments.device)
    config = ModelConfig.from_dict(json.loads(arguments.config.read_text(encoding="utf-8")), str(arguments.config))
    corpus = _first(collect(), arguments.documents)
    tokenizer = _prepare(out, corpus, config, arguments.config)
    print(f"Python {platform.python_version()}, corpus {corpus.digest}", flush=True)
    batches = _batches(corpus, tokenizer, arguments)
    print(
        f"{len(corpus.documents)} documents, {len(corpus.questions)} questions, {batches.text_tokens} tokens of "
        f"documents to train on; ready after {time.monotonic() - started:.0f} s on {_name(device)}",
        flush=True,
    )
    clock = _Clock(started, 60 * arguments.minutes - _EVALUATION_S, arguments.steps)
    weights = train(config, batches, corpus, tokenizer, out, device, clock, arguments)
    size = save(weights, config, out)
    total = sum(f.stat().st_size for f in out.iterdir())
    if total > MAX_BYTES:
        raise RuntimeError(f"{out} holds {total} bytes; {MAX_BYTES} may be shipped")
    result: dict[str, Any] = {"tensor_bytes": size, "total_bytes": total}
    if arguments.evaluate:
        result |= evaluate(Network(config, device), weights, corpus, tokenizer, device)
    print(json.dumps({**result, "seconds": round(clock.elapsed())}))


def train(
    config: ModelConfig,
    batches: Batches,
    corpus: Corpus,
    tokenizer: Tokenizer,
    out: Path,
    device: torch.device,
    clock: "_Clock",
    arguments: argparse.Namespace,
) -> Weights:
    """Train until the clock runs out. Returns the weights in the compute dtype, as they will be served."""
    on_gpu = device.type == "cuda"
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high" if on_gpu else "highest")
    master = {name: w.to(device) for name, w in initial(config, arguments.seed).items()}
    # what the network sees is rounded as the shipped file will be, so training makes up for the rounding
    weights = {name: w.to(torch.bfloat16 if on_gpu else w.dtype, copy=True) for name, w in master.items()}
    for weight in weights.values():
        weight.requires_grad_()
    optimizer = Optimizer(master, arguments.rate, arguments.decay)
    plain = Network(config, device)
    net = _compiled(plain, weights, batches.next().to(device), arguments.dropout) if arguments.compile else plain
    clock.begin()
    held = [tokenizer.encode(d.text) for d in corpus.documents if d.held_out]
    marks = [0.1, 0.25, 0.5, 0.75]
    seen, since, logged = 0, time.monotonic(), 0
    while (progress := clock.progress()) < 1:
        mode = Mode(arguments.dropout, dense=progress < _DENSE_SHARE)
        rows = batches.next()
        rows = rows.pin_memory().to(device, non_blocking=True) if on_gpu else rows
        result = losses(net, weights, rows, mode)
        result.total.backward()
        optimizer.step(weights.values(), rate(progress))
        clock.step()
        seen += rows[:, 1:].numel()
        if clock.steps in (1, 2, 5, 10, 20) or clock.steps % 200 == 0:
            # reading the loss waits for the device, so the time below is of finished work
            line = _line(clock, result, progress)
            now = time.monotonic()
            print(f"{line} tokens/s {(seen - logged) / (now - since):.0f} seen {seen / 1e6:.1f}M", flush=True)
            since, logged = now, seen
        if marks and progress >= marks[0]:
            marks.pop(0)
            nats, accepted = held_out(plain, weights, held, device, limit=24)
            save(weights, config, out)
            rates = " ".join(f"{a:.3f}" for a in accepted)
            print(f"  held out, first windows: {nats:.0f} nats, drafts agree {rates}; saved", flush=True)
            since, logged = time.monotonic(), seen
    return {name: w.detach() for name, w in weights.items()}


def rate(progress: float) -> float:
    """Share of the full learning rate: up in the first 1% of the time, level to 40%, then straight down to 1%."""
    return min(1.0, 0.02 + progress / 0.01, max(0.01, (1 - progress) / 0.6))


class _Clock:
    """Progress of the run from 0 to 1, by time or, for a short trial, by steps."""

    def __init__(self, started: float, seconds: float, max_steps: int | None) -> None:
        self.steps = 0
        self._started, self._end, self._max_steps = started, started + seconds, max_steps
        self._begun = time.monotonic()

    def begin(self) -> None:
        """Training starts now: what came before is paid for, but is no progress."""
        self._begun = time.monotonic()

    def step(self) -> None:
        self.steps += 1

    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def progress(self) -> float:
        by_time = (time.monotonic() - self._begun) / max(self._end - self._begun, 1e-9)
        return max(by_time, self.steps / self._max_steps) if self._max_steps else by_time


def _prepare(out: Path, corpus: Corpus, config: ModelConfig, config_path: Path) -> Tokenizer:
    texts = [d.text for d in corpus.documents if not d.held_out]
    texts += [f"{q.text}\n{q.answer}" for q in corpus.questions if not q.held_out]
    save_tokenizer(train_tokenizer(texts, config.vocab_size), out, config.max_position_embeddings)
    shutil.copyfile(config_path, out / "config.json")
    (out / "generation_config.json").write_text(json.dumps(_GENERATION, indent=2) + "\n", encoding="utf-8")
    return Tokenizer.load(out)


def _batches(corpus: Corpus, tokenizer: Tokenizer, arguments: argparse.Namespace) -> Batches:
    documents = [tokenizer.encode(d.text) for d in corpus.documents if not d.held_out]
    conversations = Conversations([q for q in corpus.questions if not q.held_out], tokenizer)
    share, shape = arguments.question_share, (arguments.rows, arguments.length)
    return Batches(documents, conversations, share, *shape, arguments.seed)


def _first(corpus: Corpus, count: int | None) -> Corpus:
    """The corpus, or for a trial its first documents with questions in proportion."""
    if count is None:
        return corpus
    questions = corpus.questions[:: max(1, len(corpus.documents) // count)]
    aside = [d for d in corpus.documents if d.held_out][:2]
    return Corpus((*corpus.documents[:count], *aside), questions)


def _compiled(plain: Network, weights: Weights, rows: Tensor, dropout: float) -> Network:
    """The network with its blocks compiled, tried out on rows; the plain one where that fails."""
    net = Network(plain.config, rows.device, lambda f: torch.compile(f, dynamic=False))
    begun = time.monotonic()
    try:
        losses(net, weights, rows, Mode(dropout)).total.backward()
    except Exception as error:  # a compiler's failure can be anything, and must not cost the run
        print(f"not compiled: {str(error)[:500]}", flush=True)
        net = plain
    for weight in weights.values():
        weight.grad = None
    print(f"compiling took {time.monotonic() - begun:.0f} s", flush=True)
    return net


def _line(clock: _Clock, result: Losses, progress: float) -> str:
    drafts = " ".join(f"{d:.3f}" for d in result.drafts.tolist())
    extra = " ".join(f"{e:.3f}" for e in result.extra.tolist())
    return (
        f"{clock.elapsed():.0f} s step {clock.steps} {100 * progress:.1f}% next {result.next_token.item():.3f} "
        f"drafts {drafts} balance, z, index {extra} rate {rate(progress):.3f}"
    )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory the model is written to")
    parser.add_argument("--minutes", type=float, default=8.0, help="wall-clock time of the whole command")
    parser.add_argument("--rows", type=int, default=32, help="rows in a batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--question-share", type=float, default=0.3, help="share of rows that hold questions")
    parser.add_argument("--compile", action="store_true", help="compile the blocks: slow to start, then faster")
    parser.add_argument("--evaluate", action=argparse.BooleanOptionalAction, default=True, help="measure at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=_SHIPPED, help="config.json of the model")
    parser.add_argument("--steps", type=int, help="for a trial: stop after this many steps")
    parser.add_argument("--documents", type=int, help="for a trial: use this many documents")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
