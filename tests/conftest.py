"""One thread, and examples that are the same on every machine: a red test is red for everybody.

Tests marked slow draw new examples in every run (`derandomize=False`).
"""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile(
    "stepfloor",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("stepfloor")
