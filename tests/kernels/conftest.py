"""Recordings are made once a session; tests must not change them."""

import pytest
import torch

from tests.kernels.source import SHAPES, Recording


@pytest.fixture(
    scope="session", params=[(shape, dtype) for dtype in ("fp32", "bf16") for shape in SHAPES], ids="-".join
)
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    shape, dtype = request.param
    return Recording(tmp_path_factory.mktemp("source"), shape, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
