"""stepfloor's model run by hand, one sequence in slot 0, so that a test sees logits and cache and not only ids."""

from itertools import pairwise

import torch
from torch import Tensor

from stepfloor.cache.tensors import CacheTensors, Rows, allocate
from stepfloor.config import EngineConfig
from stepfloor.kernels import qsa_attend
from stepfloor.model.load import load_model
from stepfloor.model.model import Model
from stepfloor.model.tensors import TensorSource
from stepfloor.weights.checkpoint import Checkpoint


def engine_config(**changes: object) -> EngineConfig:
    """Small pages and chunks, so that short sequences cross many of their edges."""
    return EngineConfig(**{"max_num_seqs": 1, "max_model_len": 160, "block_size": 8, **changes})  # type: ignore[arg-type]


class Ours:
    """A loaded model and the cache of one sequence."""

    def __init__(self, checkpoint: Checkpoint, source: TensorSource | None = None, **changes: object) -> None:
        self.config = engine_config(**changes)
        self.model: Model = load_model(checkpoint, self.config.positions, "cpu", source=source)
        self.start()

    def start(self) -> None:
        """Forget the sequence."""
        self.cache: CacheTensors = allocate(self.model.config, self.config, self.model.embedding.dtype)
        # pages in falling order: a position that is not looked up through the table shows
        self.cache.page_table[0] = torch.arange(self.config.pages_per_sequence, 0, -1)
        self.seen: list[int] = []

    @torch.inference_mode()
    def chunk(self, tokens: list[int], following: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Run the next tokens as a prompt chunk: the target's residual and hidden, or the drafter's."""
        model, width = self.model, self.model.config.ngram_size - 1
        history = ([model.config.eos_token_id] * width + self.seen)[-width:]
        zero = torch.zeros(1, dtype=torch.int64)
        rows = Rows(
            torch.tensor([tokens]), zero, zero + len(self.seen), zero, zero, torch.tensor([history]), chunk=True
        )
        self.seen = self.seen + tokens
        residual, hidden = model.target(rows, self.cache)
        if following is not None:
            assert model.drafter is not None
            return model.draft(model.drafter, residual, torch.tensor([following]), rows, self.cache)
        return residual, hidden

    def logits(self, tokens: list[int], cuts: tuple[int, ...] = ()) -> Tensor:
        """[T, V] of a new sequence, in one chunk or split at the cuts."""
        self.start()
        edges = sorted({0, len(tokens), *(cut for cut in cuts if 0 < cut < len(tokens))})
        with torch.inference_mode():
            return torch.cat([self.model.logits(self.chunk(tokens[a:b])[1]) for a, b in pairwise(edges)])


def kept_sets(selected: Tensor, first: int, ratio: int) -> list[set[int]]:
    """Positions each row of one sequence keeps; selected [R, topk]."""
    return [set(qsa_attend.kept_positions(row, first + r, ratio).tolist()) for r, row in enumerate(selected)]
