"""The shipped model on a GPU: graphs against eager steps, drafts against none, many against one, GPU against CPU.

`python3 -m pytest tests/test_engine_gpu.py -m gpu -q -s`; results are kept in benchmarks/.
"""

from functools import cache
from pathlib import Path

import pytest
import torch

import stepfloor
from stepfloor.config import EngineConfig
from stepfloor.engine import Engine
from stepfloor.request import Request, SamplingParams
from stepfloor.tokenizer.tokenizer import Tokenizer
from stepfloor.weights.checkpoint import Checkpoint, open_checkpoint

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


@cache
def shipped() -> Checkpoint:
    return open_checkpoint(SHIPPED)


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    tokenizer = Tokenizer.load(SHIPPED)
    return tuple(tuple(tokenizer.encode(text)) for text in TEXTS)


def serve(
    count: int, k: int, device: str = "cuda", temperature: float = 0.0, late: int = 0, new: int = NEW, **changes: object
) -> list[list[int]]:
    """Ids of the first `count` prompts, served together; the last `late` of them join after 20 pieces."""
    config = EngineConfig(spec_tokens=k, max_num_seqs=count, max_model_len=512, device=device, **changes)  # type: ignore[arg-type]
    engine = Engine(shipped(), config)
    out: dict[str, list[int]] = {str(i): [] for i in range(count)}

    def submit(i: int) -> None:
        sampling = SamplingParams(temperature=temperature, top_p=0.9 if i % 2 else 1.0, seed=i)
        engine.submit(Request(str(i), prompts()[i], sampling, new))

    for i in range(count - late):
        submit(i)
    for number, piece in enumerate(engine.run(), 1):
        out[piece.request_id] += piece.token_ids
        if number == 20:
            for i in range(count - late, count):
                submit(i)
    return [out[str(i)] for i in range(count)]


@cache
def alone(k: int = 0) -> list[list[int]]:
    """Each prompt by itself, eagerly."""
    config = EngineConfig(spec_tokens=k, max_num_seqs=1, max_model_len=512, device="cuda", enforce_eager=True)
    engine = Engine(shipped(), config)
    out = []
    for i, ids in enumerate(prompts()):
        engine.submit(Request(str(i), ids, SamplingParams(temperature=0.0, seed=i), NEW))
        out.append([token for piece in engine.run() for token in piece.token_ids])
    return out


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16])
def test_graphs_drafts_and_neighbours_change_no_id(count: int, k: int) -> None:
    assert serve(count, k) == alone()[:count]


@pytest.mark.parametrize("k", [0, 3])
def test_joining_in_mid_stream_changes_no_id(k: int) -> None:
    assert serve(9, k, late=4) == alone()[:9]


def test_eager_is_graph() -> None:
    assert serve(5, 3, enforce_eager=True) == serve(5, 3)


@pytest.mark.parametrize("k", [0, 3])
def test_sampled_ids_do_not_depend_on_neighbours(k: int) -> None:
    together = serve(8, k, temperature=0.8)
    assert together[:3] == serve(3, k, temperature=0.8)
    assert len({tuple(ids) for ids in together}) == 8


def test_coupled_acceptance_is_the_same_text_for_every_k() -> None:
    assert serve(4, 3, temperature=0.8, acceptance="coupled") == serve(4, 0, temperature=0.8, acceptance="coupled")


def test_the_cpu_writes_the_same_ids_but_for_near_ties() -> None:
    """Sums come in another order on the GPU: a token may differ where two logits are a few steps apart."""
    from tests.ours import Ours

    ours = Ours(shipped(), max_model_len=512)
    same = 0
    for prompt, gpu in zip(prompts(), alone(), strict=True):
        logits = ours.logits([*prompt, *gpu[:-1]])[len(prompt) - 1 :].float()
        best = logits.argmax(-1).tolist()
        differing = [i for i, (a, b) in enumerate(zip(gpu, best, strict=True)) if a != b]
        same += len(gpu) - len(differing)
        for i in differing:
            gap = float(logits[i, best[i]] - logits[i, gpu[i]])
            step = 2.0**-8 * float(logits[i].abs().max())
            print(f"near-tie: position {i}, CPU {best[i]}, GPU {gpu[i]}, gap {gap:.4f}, one bf16 step is {step:.4f}")
            assert gap <= 8 * step
    total = sum(len(ids) for ids in alone())
    print(f"{same} of {total} ids are the CPU's")
    assert same >= 0.98 * total
