"""How good the small model is: bits per byte beside xz, docstrings recalled, drafts accepted.

    python -m demo.evaluate DIRECTORY

All of it is teacher-forced, one forward over known text. That loses nothing for greedy decoding: it reproduces a
sentence exactly when each token of the sentence is the most probable after those before it, and it accepts a draft
exactly when the draft is the token that follows.
"""

import argparse
import json
import lzma
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.chat import prompt
from demo.corpus import Corpus, Question, collect
from demo.forward import Mode, Network
from demo.losses import DRAFT_PASSES
from demo.tokenizer import END_OF_TEXT
from demo.weights import Weights, load
from stepfloor.config import ModelConfig
from stepfloor.tokenizer.tokenizer import Tokenizer

WINDOW, STRIDE = 1024, 512
PROMPT_TOKENS, CONTINUED_TOKENS, REPEATED_NGRAM = 64, 128, 16


def evaluate(
    net: Network, weights: Weights, corpus: Corpus, tokenizer: Tokenizer, device: torch.device
) -> dict[str, Any]:
    """Every measure of this file, as a flat dict for printing."""
    texts = [d.text for d in corpus.documents if d.held_out]
    documents = [tokenizer.encode(text) for text in texts]
    size = sum(len(t.encode()) for t in texts)
    trained = [q for q in corpus.questions if not q.held_out]
    sampled = random.Random(0).sample(trained, min(200, len(trained)))
    nats, accepted = held_out(net, weights, documents, device)
    steps = delivered(net, weights, documents, device)
    return {
        "held_out_bytes": size,
        "bits_per_byte": round(nats / math.log(2) / size, 4),
        "xz_bits_per_byte": round(8 * len(lzma.compress("".join(texts).encode(), preset=9)) / size, 4),
        "recalled_share": round(recalled(net, weights, sampled, tokenizer, device), 4),
        "accepted_teacher_forced": [round(a, 4) for a in accepted],
        **steps,
    }


@torch.no_grad()
def held_out(
    net: Network, weights: Weights, documents: Sequence[list[int]], device: torch.device, limit: int | None = None
) -> tuple[float, list[float]]:
    """Nats of all documents, and the share of rows where each draft pass agrees with the target's first choice.

    Long documents are read in windows that overlap by half; a token is judged in the window with more before it.
    limit  windows read at most; the nats are then of those alone
    """
    nats, counted = 0.0, 0
    agreed = torch.zeros(DRAFT_PASSES, device=device)
    for start, window in _windows(documents, limit):
        tokens = torch.tensor([window], device=device)
        logits, drafts = choices(net, weights, tokens)
        following = tokens[0, 1:]
        nats += F.cross_entropy(logits[0, start:].float(), following[start:], reduction="sum").item()
        best = logits[0].argmax(-1)
        for j, draft in enumerate(drafts):
            agreed[j] += (draft[0, max(start, j) : -1] == best[max(start, j) + 1 :]).sum()
        counted += len(window) - 2 - start
    return nats, (agreed / max(counted, 1)).tolist()


@torch.no_grad()
def recalled(
    net: Network, weights: Weights, questions: Sequence[Question], tokenizer: Tokenizer, device: torch.device
) -> float:
    """Share of questions whose answer's first sentence greedy decoding gives back exactly."""
    right = 0
    for question in questions:
        asked, answer = prompt(question, tokenizer), tokenizer.encode(question.answer)
        size, count = 0, 0
        while size < len(question.first_sentence.encode()):
            size += len(tokenizer.token_bytes(answer[count]))
            count += 1
        tokens = torch.tensor([asked + answer[:count]], device=device)
        mixed, _, _ = net.target(weights, tokens[:, :-1], Mode())
        best = F.linear(mixed[:, len(asked) - 1 :], weights["lm_head.weight"]).argmax(-1)
        right += bool((best == tokens[:, len(asked) :]).all())
    return right / len(questions)


@torch.no_grad()
def delivered(
    net: Network, weights: Weights, documents: Sequence[list[int]], device: torch.device, prompts: int = 64
) -> dict[str, Any]:
    """Greedy continuations of held-out prompts, and how many tokens a step of three drafts delivers on them.

    A continuation that repeats an n-gram of 16 tokens is left out and counted: repetition is easy to draft.
    """
    starts = [d[i : i + PROMPT_TOKENS] for d in documents for i in range(0, len(d) - PROMPT_TOKENS, 4 * PROMPT_TOKENS)]
    chosen = random.Random(1).sample(starts, min(prompts, len(starts)))
    tokens = torch.tensor(chosen, device=device)
    for _ in range(CONTINUED_TOKENS):
        mixed, _, _ = net.target(weights, tokens, Mode())
        best = F.linear(mixed[:, -1:], weights["lm_head.weight"]).argmax(-1)
        tokens = torch.cat((tokens, best), 1)
    kept = torch.tensor([not _repeats(row[PROMPT_TOKENS:]) for row in tokens.tolist()])
    result: dict[str, Any] = {"prompts": len(chosen), "repeating": int((~kept).sum())}
    if not kept.any():
        return result | {"tokens_per_step": None, "accepted_greedy": None}
    tokens = tokens[kept.to(device)]
    _, drafts = choices(net, weights, tokens)
    right = [(draft[:, :-1] == tokens[:, 2:]).cpu() for draft in drafts]  # row p of pass j is about the token at p + 2
    steps, out, tries, hits = 0, 0, [0] * DRAFT_PASSES, [0] * DRAFT_PASSES
    for b in range(tokens.shape[0]):
        newest = PROMPT_TOKENS  # position of the newest token, which no target step has read yet
        while newest + DRAFT_PASSES < tokens.shape[1]:
            accepted = 0
            while accepted < DRAFT_PASSES:
                tries[accepted] += 1
                if not right[accepted][b, newest - 1 + accepted]:
                    break
                hits[accepted] += 1
                accepted += 1
            steps, out, newest = steps + 1, out + accepted + 1, newest + accepted + 1
    rates = [round(h / max(t, 1), 4) for h, t in zip(hits, tries, strict=True)]
    return result | {"tokens_per_step": round(out / steps, 4), "accepted_greedy": rates}


def choices(net: Network, weights: Weights, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """tokens [B, T + 1] -> the target's logits [B, T, vocabulary] and each pass's first choices [B, T]."""
    mixed, residual, _ = net.target(weights, tokens[:, :-1], Mode())
    vectors, _ = net.drafts(weights, residual, tokens[:, 1:], Mode(), DRAFT_PASSES)
    head = weights["lm_head.weight"]
    return F.linear(mixed, head), [F.linear(v, head).argmax(-1) for v in vectors]


def _windows(documents: Sequence[list[int]], limit: int | None) -> Iterator[tuple[int, list[int]]]:
    """(first row to judge, tokens) with an end-of-text before each document."""
    made = 0
    for document in documents:
        stream = [END_OF_TEXT, *document]
        for begin in range(0, max(len(stream) - 1 - WINDOW + STRIDE, 1), STRIDE):
            if made == limit:
                return
            made += 1
            yield (0 if begin == 0 else WINDOW - STRIDE), stream[begin : begin + WINDOW + 1]


def _repeats(ids: list[int]) -> bool:
    grams = [tuple(ids[i : i + REPEATED_NGRAM]) for i in range(len(ids) - REPEATED_NGRAM + 1)]
    return len(set(grams)) < len(grams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    config, device = ModelConfig.load(arguments.directory), torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = {name: w.to(device, dtype) for name, w in load(config, arguments.directory).items()}
    result = evaluate(Network(config, device), weights, collect(), Tokenizer.load(arguments.directory), device)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
