"""What torch's allocator may take of a GPU: pages that go back once they are free, and no more than the plan says."""

import torch

from stepfloor.roofline.memory import MemoryPlan


def open_memory(device: str) -> None:
    """Let torch map a GPU's memory page by page, not in blocks that stay whole while one tensor lives in them.

    Loading leaves gaps between the weights: in such blocks they came to 4.8 GiB beside 84.6 GiB in use on an H200.
    Called before the first allocation; a limit that an earlier plan set is lifted.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.set_per_process_memory_fraction(1.0, _index(device))


def keep_to_plan(plan: MemoryPlan, device: str) -> None:
    """Make the plan's total a limit of this process: what would pass it is an out-of-memory error, not a neighbour's.

    plan    made when its `available` bytes were what the device had free
    device  where all that the plan names is allocated by now, kernels and graphs included
    """
    free, whole = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    # the driver's: kernels, graphs; on unified memory the driver counts file pages too, so that cannot be told
    elsewhere = 0 if plan.capacity.unified else max(0, plan.available("device") - free - reserved)
    allowed = max(0, plan.total("device") - elsewhere)
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / whole), _index(device))


def _index(device: str) -> int:
    """Of a CUDA device; some of torch's functions take no name without one."""
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index
