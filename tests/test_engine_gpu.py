"""The shipped model on a GPU: graphs against eager steps, drafts against none, many against one, GPU against CPU.

`python3 -m pytest tests/test_engine_gpu.py -m gpu -q -s`; results are kept in benchmarks/. What says most comes first,
and all engines share one model, so a run that is cut has seen something of everything.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import stepfloor
from stepfloor.config import EngineConfig
from stepfloor.engine import Engine
from stepfloor.model.load import load_model
from stepfloor.model.model import Model
from stepfloor.request import Request, SamplingParams
from stepfloor.step.step import STAGE_SETS
from stepfloor.tokenizer.tokenizer import Tokenizer
from stepfloor.weights.checkpoint import Checkpoint, open_checkpoint
from tests.ours import Ours

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run it on one and keep the result"),
]
SHIPPED = Path(stepfloor.__file__).parent / "shipped"
TEXTS = (
    "def main(",
    "import os\nimport sys\n\n\ndef ",
    'class Queue:\n    """A queue."""\n\n    def __init__(self',
    "    for name in sorted(",
    "# Copyright",
    "from collections import ",
    "    if not isinstance(value, ",
    "raise ValueError(",
    "with open(path) as file:\n    ",
    "def test_",
    "    return [",
    "try:\n    ",
    "    def close(self):\n        ",
    "x = ",
    "assert ",
    "    while True:\n",
)
NEW = 96
MOST_DRAFTS = 4
DEVICE = "cuda"
# Two orders of the same sums may round each of the residual's 24 writes (two a layer, 12 layers) to neighbouring bf16
# numbers, 2**-8 apart. Taken as independent that is sqrt(24) = 5 steps on a logit and 7 on the difference of two; the
# logits' own rounding is one more.
NEAR_STEPS = 8


@cache
def shipped() -> Checkpoint:
    return open_checkpoint(SHIPPED)


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    tokenizer = Tokenizer.load(SHIPPED)
    return tuple(tuple(tokenizer.encode(text)) for text in TEXTS)


@cache
def loaded() -> Model:
    """The model on the device, for as many rows as any test has; an engine without drafts leaves its drafter out."""
    widest = EngineConfig(spec_tokens=MOST_DRAFTS, max_num_seqs=len(TEXTS), max_model_len=512)
    return load_model(shipped(), widest.positions, DEVICE, decode_rows=len(TEXTS) * (MOST_DRAFTS + 1))


def engine(count: int, k: int, **changes: object) -> Engine:
    config = EngineConfig(spec_tokens=k, max_num_seqs=count, max_model_len=512, device=DEVICE, **changes)  # type: ignore[arg-type]
    # graphs of one kind: a test of all kinds is below
    return Engine(
        shipped(), config, model=loaded() if k else replace(loaded(), drafter=None), stage_sets=STAGE_SETS[:1]
    )


def serve(count: int, k: int, temperature: float = 0.0, late: int = 0, **changes: object) -> list[list[int]]:
    """Ids of the first `count` prompts, served together; the last `late` of them join after 20 pieces."""
    serving = engine(count, k, **changes)
    out: dict[str, list[int]] = {str(i): [] for i in range(count)}

    def submit(i: int) -> None:
        sampling = SamplingParams(temperature=temperature, top_p=0.9 if i % 2 else 1.0, seed=i)
        serving.submit(Request(str(i), prompts()[i], sampling, NEW))

    for i in range(count - late):
        submit(i)
    for number, piece in enumerate(serving.run(), 1):
        out[piece.request_id] += piece.token_ids
        if number == 20:
            for i in range(count - late, count):
                submit(i)
    return [out[str(i)] for i in range(count)]


@cache
def alone() -> list[list[int]]:
    """Each prompt by itself, one after the other in one engine, without drafts."""
    serving = engine(1, 0)
    out = []
    for i, ids in enumerate(prompts()):
        serving.submit(Request(str(i), ids, SamplingParams(temperature=0.0, seed=i), NEW))
        out.append([token for piece in serving.run() for token in piece.token_ids])
    return out


def test_the_cpu_writes_the_same_ids_but_for_near_ties() -> None:
    """Sums come in another order on the GPU: a token may differ where two logits are a few steps apart.

    The CPU reads what the GPU wrote, so that one near-tie does not make all later tokens differ.
    """
    ours = Ours(shipped(), max_model_len=512)
    same, far = 0, []
    for text, (prompt, gpu) in enumerate(zip(prompts(), alone(), strict=True)):
        logits = ours.logits([*prompt, *gpu[:-1]])[len(prompt) - 1 :].float()
        best = logits.argmax(-1).tolist()
        differing = [i for i, (a, b) in enumerate(zip(gpu, best, strict=True)) if a != b]
        same += len(gpu) - len(differing)
        for i in differing:
            gap = float(logits[i, best[i]] - logits[i, gpu[i]])
            step = 2.0**-8 * float(logits[i].abs().max())
            line = f"text {text}, token {i}: CPU {best[i]}, GPU {gpu[i]}, gap {gap:.4f} = {gap / step:.1f} bf16 steps"
            print(f"near-tie: {line}", flush=True)
            if gap > NEAR_STEPS * step:
                far.append(line)
    total = sum(len(ids) for ids in alone())
    print(f"{same} of {total} ids are the CPU's; {total - same} near-ties", flush=True)
    assert not far
    assert same >= 0.98 * total


@pytest.mark.parametrize("k", [0, 3])
def test_sampled_ids_do_not_depend_on_neighbours(k: int) -> None:
    together = serve(8, k, temperature=0.8)
    assert together[:3] == serve(3, k, temperature=0.8)
    assert len({tuple(ids) for ids in together}) == 8


def test_coupled_acceptance_is_the_same_text_for_every_k() -> None:
    assert serve(4, 3, temperature=0.8, acceptance="coupled") == serve(4, 0, temperature=0.8, acceptance="coupled")


@pytest.mark.parametrize(("count", "k"), [(1, 0), (5, 3)])
def test_eager_is_graph(count: int, k: int) -> None:
    assert serve(count, k, enforce_eager=True) == serve(count, k)


def test_every_graph_is_captured_at_the_start() -> None:
    """No request waits for a capture, whatever it asks of the sampler and whoever joins; ids are those of any k."""
    ranges = ((1, 2, 3), (3, 4, 1))
    config = EngineConfig(3, ranges, max_num_seqs=5, max_model_len=512, device=DEVICE)
    serving = Engine(shipped(), config, model=loaded())
    captured = set(serving.step.graphs.made)
    assert {(size, k) for size, k, _ in captured} == {(1, 3), (2, 3), (4, 1), (5, 3)}
    greedy: dict[str, list[int]] = {}
    # the first sequence of the last batch wants its log-probabilities: it decodes apart, the others with its k
    settings = ({}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 20}, {"logit_bias": ((7, 1.0),)}, {})
    for number, setting in enumerate(settings):
        for i in range(5):
            sampling = SamplingParams(**({"temperature": 0.0} | (setting if i == 0 else {})), seed=i)  # type: ignore[arg-type]
            wanted = 1 if number == len(settings) - 1 and i == 0 else None
            serving.submit(Request(f"{number} {i}", prompts()[i], sampling, NEW // (i + 1), logprobs=wanted))
        for piece in serving.run():
            greedy.setdefault(piece.request_id, []).extend(piece.token_ids)
    assert set(serving.step.graphs.made) == captured
    for number in range(len(settings)):
        for i in range(1, 5):
            assert greedy[f"{number} {i}"] == alone()[i][: NEW // (i + 1)]


@pytest.mark.parametrize("k", [0, 3])
def test_joining_in_mid_stream_changes_no_id(k: int) -> None:
    assert serve(9, k, late=4) == alone()[:9]


@pytest.mark.parametrize("k", [3, 0, 1, 2, 4])
@pytest.mark.parametrize("count", [16, 1, 2, 3, 7])
def test_graphs_drafts_and_neighbours_change_no_id(count: int, k: int) -> None:
    assert serve(count, k) == alone()[:count]
