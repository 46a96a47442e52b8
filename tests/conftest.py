"""One thread, and examples that are the same on every machine: a red test is red for everybody.

Tests marked slow draw new examples in every run (`derandomize=False`).
"""

import os

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# Without a GPU, the interpreter runs Triton kernels on the CPU. Said before Triton is imported: its own functions, such
# as tl.sum, are kernels too, and it reads this when it defines them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # noqa: TID251
    import tests.interpreter  # noqa: F401 (rounds as a GPU does)

settings.register_profile(
    "stepfloor",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("stepfloor")
