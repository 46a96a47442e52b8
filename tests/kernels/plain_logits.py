"""Logit processing, one row at a time, in Python floats: the second opinion of the tests.

Written from the rules (vLLM's order and meanings), not from the kernel.
"""

import math
from collections.abc import Sequence

NEVER = -math.inf


def plain_row(
    logits: Sequence[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    bias: dict[int, float] | None = None,
    forbidden: Sequence[int] = (),
) -> list[float]:
    """The processed logits of one row."""
    row = [float(x) for x in logits]
    for token, value in (bias or {}).items():
        row[token] += value
    for token in set(prompt) | set(output):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= frequency * list(output).count(token) + presence
    for token in forbidden:
        row[token] = NEVER
    if temperature == 0:
        return row
    row = [x / temperature for x in row]
    best = max(row)
    row = [x if math.exp(x - best) >= min_p else NEVER for x in row]
    if top_k > 0:
        kth = sorted(row, reverse=True)[min(top_k, len(row)) - 1]
        row = [x if x >= kth else NEVER for x in row]
    if top_p < 1:
        probabilities = plain_softmax(row)
        # worst first; among equals the higher id first
        worst_first = sorted(range(len(row)), key=lambda i: (row[i], -i))
        cumulative = 0.0
        for token in worst_first[:-1]:
            cumulative += probabilities[token]
            if cumulative > 1 - top_p:
                break
            row[token] = NEVER
    return row


def plain_softmax(row: Sequence[float]) -> list[float]:
    """Probabilities of one row."""
    best = max(row)
    weights = [math.exp(x - best) for x in row]
    return [w / sum(weights) for w in weights]
