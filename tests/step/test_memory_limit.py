"""How much of the plan is left to torch's allocator."""

import logging

import pytest

from stepfloor.config import EngineConfig
from stepfloor.roofline.memory import MemoryPlan, discrete_capacity, plan_memory, unified_capacity
from stepfloor.roofline.planned import CASES, planned_weights
from stepfloor.step.memory import DRIVER_BYTES, allowed_bytes
from tests.roofline.released import SHIPPED

GIB = 1 << 30
FREE = 100 * GIB
LOADED = GIB // 4


def made(unified: bool = False, eager: bool = False) -> MemoryPlan:
    capacity = unified_capacity({"MemAvailable": FREE}) if unified else discrete_capacity(FREE, FREE)
    return plan_memory(SHIPPED, planned_weights(SHIPPED, CASES["a"]), EngineConfig(enforce_eager=eager), capacity)


def test_what_the_driver_took_is_off() -> None:
    plan = made()
    assert allowed_bytes(plan, FREE - LOADED, LOADED) == plan.total("device")
    assert allowed_bytes(plan, FREE - LOADED - GIB // 2, LOADED) == plan.total("device") - GIB // 2
    assert allowed_bytes(plan, FREE, LOADED) == plan.total("device")  # a neighbour left


@pytest.mark.parametrize("eager", [False, True])
def test_a_neighbour_that_loads_beside_us_is_not_the_driver(eager: bool, caplog: pytest.LogCaptureFixture) -> None:
    """21 GiB of another process, started at the same time, left the shipped model 0 bytes: its first prompt ended."""
    plan = made(eager=eager)
    own = sum(x.nbytes for x in plan.lines if x.where == "device" and x.component not in ("reserve", "graphs"))
    beside = plan.capacity.device_reserve - DRIVER_BYTES  # torch had reserved 64 MiB when it was refused
    with caplog.at_level(logging.WARNING):
        assert allowed_bytes(plan, FREE - LOADED - 21 * GIB, LOADED) == own + beside >= GIB // 2
    assert "another process's" in caplog.text


def test_unified_memory_is_the_plan_s_total() -> None:
    plan = made(unified=True)
    assert allowed_bytes(plan, 0, LOADED) == plan.total("device")
