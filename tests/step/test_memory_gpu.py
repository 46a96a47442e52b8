"""The memory plan as a limit of the process, on a GPU."""

from pathlib import Path

import pytest
import torch

import stepfloor
from stepfloor.config import EngineConfig
from stepfloor.engine import Engine, check_memory
from stepfloor.request import Request, SamplingParams
from stepfloor.server.worker import warm_up
from stepfloor.step.memory import open_memory
from stepfloor.weights.checkpoint import open_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the CPU has no memory plan"),
]


def test_an_engine_serves_within_its_plan_and_cannot_pass_it() -> None:
    """What the plan does not name is an out-of-memory error; what it names is there before the first request."""
    checkpoint = open_checkpoint(Path(stepfloor.__file__).parent / "shipped")
    config = EngineConfig(device="cuda", max_model_len=512)
    plan = check_memory(checkpoint, config)
    engine = Engine(checkpoint, config)
    try:
        engine.submit(Request("a", (5, 6, 7), SamplingParams(temperature=0.0), 20))
        assert sum(len(piece.token_ids) for piece in engine.run()) == 20
        assert engine.report()["bandwidth_gbps"] > 100  # a read of gigabytes, of which the plan knows nothing
        warm_up(engine)
        assert torch.cuda.memory_reserved() <= plan.total("device")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(plan.total("device"), dtype=torch.uint8, device="cuda")
    finally:
        open_memory("cuda")
    torch.empty(plan.total("device"), dtype=torch.uint8, device="cuda")
