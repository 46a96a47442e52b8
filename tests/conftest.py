"""One thread, and examples that are the same on every machine: a red test is red for everybody.

Tests marked slow draw new examples in every run (`derandomize=False`).
"""

import torch
import triton
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# before any kernel is defined: without a GPU, the interpreter runs Triton kernels on the CPU
triton.knobs.runtime.interpret = not torch.cuda.is_available()

settings.register_profile(
    "stepfloor",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("stepfloor")
