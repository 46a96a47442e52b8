"""Does drafting pay on this machine: tokens/s with k drafts over tokens/s without, on held-out text, in pairs.

    python -m benchmarks.drafting [--spec-tokens 3] [--prompts 24]

Each prompt is 64 tokens of a held-out file of the small model's corpus, continued greedily by 64. Both arms run each
prompt, the order turned round with every prompt, and the ratio of their times is one sample. The texts must be
equal, or the run stops. Continuations that repeat 16 tokens are counted and left out of the tokens a step.
"""

import argparse
import json
import math
import platform
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from scipy import stats

import stepfloor
from demo.corpus import collect
from stepfloor.config import EngineConfig
from stepfloor.engine import Counters, Engine
from stepfloor.request import Request, SamplingParams
from stepfloor.tokenizer.tokenizer import Tokenizer
from stepfloor.weights.checkpoint import open_checkpoint

PROMPT_TOKENS, NEW_TOKENS, REPEAT = 64, 64, 16


@dataclass(frozen=True, slots=True)
class Result:
    """ratio  geometric mean of tokens/s with drafts over without, and its 95 % interval (Student's t on logs)."""

    spec_tokens: int
    prompts: int
    repeating: int
    delivered_per_step: float
    accepted_per_position: tuple[float, ...]
    tokens_per_s_plain: float
    tokens_per_s_drafting: float
    ratio: float
    ratio_low: float
    ratio_high: float
    threads: int
    torch: str
    python: str
    version: str

    def verdict(self) -> str:
        """Whether the interval leaves 1 on one side."""
        if self.ratio_low > 1:
            return "drafting pays"
        return "drafting costs" if self.ratio_high < 1 else "unresolved"


def main() -> None:
    arguments = _arguments()
    if arguments.prompts < 2:
        raise SystemExit("benchmarks.drafting: an interval needs at least 2 prompts; pass --prompts 2 or more")
    checkpoint = open_checkpoint(arguments.model)
    tokenizer = Tokenizer.load(checkpoint.directory)
    prompts = held_out_prompts(tokenizer, arguments.prompts)
    k = arguments.spec_tokens
    arms = {arm: Engine(checkpoint, EngineConfig(spec_tokens=arm), tokenizer) for arm in (0, k)}
    for engine in arms.values():
        _continue(engine, prompts[0], "warm-up")
    logs: list[float] = []
    seconds = dict.fromkeys(arms, 0.0)
    counted, repeating = Counters([0] * k, [0] * k), 0
    for i, prompt in enumerate(prompts):
        times: dict[int, float] = {}
        texts: dict[int, list[int]] = {}
        counters = arms[k].counters = Counters([0] * k, [0] * k)
        for arm in (0, k) if i % 2 else (k, 0):
            start = time.perf_counter()
            texts[arm] = _continue(arms[arm], prompt, str(i))
            times[arm] = time.perf_counter() - start
            seconds[arm] += times[arm]
        if texts[0] != texts[k]:
            raise RuntimeError(f"prompt {i}: the text with {k} drafts differs from the text without")
        logs.append(math.log(times[0] / times[k]))
        if repeats(texts[k]):
            repeating += 1
        else:
            counted.add(counters)
        print(f"\r{i + 1} of {len(prompts)} prompts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    mean = statistics.fmean(logs)
    half = float(stats.t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    tokens = len(prompts) * NEW_TOKENS
    result = Result(
        spec_tokens=k,
        prompts=len(prompts),
        repeating=repeating,
        delivered_per_step=round(counted.delivered_per_step, 4),
        accepted_per_position=tuple(round(share, 4) for share in counted.acceptance()),
        tokens_per_s_plain=round(tokens / seconds[0], 2),
        tokens_per_s_drafting=round(tokens / seconds[k], 2),
        ratio=round(math.exp(mean), 4),
        ratio_low=round(math.exp(mean - half), 4),
        ratio_high=round(math.exp(mean + half), 4),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        python=platform.python_version(),
        version=stepfloor.__version__,
    )
    print(
        f"k={k}: {result.tokens_per_s_drafting:.1f} tokens/s against {result.tokens_per_s_plain:.1f} without drafts, "
        f"ratio {result.ratio:.3f} [{result.ratio_low:.3f}, {result.ratio_high:.3f}], {result.verdict()}; "
        f"{result.delivered_per_step:.2f} delivered a step over {len(prompts) - repeating} prompts "
        f"({repeating} repeating, left out)"
    )
    print(json.dumps(asdict(result)))


def held_out_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Windows of held-out files, PROMPT_TOKENS each, the same ones in every run."""
    texts = [d.text for d in collect().documents if d.held_out]
    windows = [
        ids[i : i + PROMPT_TOKENS]
        for ids in (tokenizer.encode(text) for text in texts)
        for i in range(0, len(ids) - PROMPT_TOKENS, 8 * PROMPT_TOKENS)
    ]
    return random.Random(0).sample(windows, min(count, len(windows)))


def repeats(ids: list[int]) -> bool:
    """Whether any run of REPEAT ids occurs twice."""
    runs = [tuple(ids[i : i + REPEAT]) for i in range(len(ids) - REPEAT + 1)]
    return len(set(runs)) < len(runs)


def _continue(engine: Engine, prompt: list[int], name: str) -> list[int]:
    """NEW_TOKENS greedy ids; no stop ids, so that both arms do the same work."""
    engine.submit(Request(name, tuple(prompt), SamplingParams(temperature=0.0), NEW_TOKENS))
    return [token for piece in engine.run() for token in piece.token_ids]


def _arguments() -> argparse.Namespace:
    shipped = Path(stepfloor.__file__).parent / "shipped"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=shipped, help="a checkpoint with a tokenizer")
    parser.add_argument("--spec-tokens", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=24)
    return parser.parse_args()


if __name__ == "__main__":
    main()
