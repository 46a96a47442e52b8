"""Page-locked copies: the values, no byte more than them, and locked exactly as long as they are used."""

import gc
import mmap

import pytest
import torch

from stepfloor.errors import UserError
from stepfloor.model.pinned import pinned_copy


class Driver:
    """What the driver would keep: ranges of locked memory."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.answer:
            self.locked[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.mark.parametrize("tensor", [torch.arange(3 * 5000.0).view(3, 5000), torch.tensor(2.5), torch.ones(7).byte()])
def test_a_copy_is_locked_while_it_is_used(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    first, second = pinned_copy(tensor), pinned_copy(tensor)
    assert torch.equal(first, tensor)
    assert first.dtype == tensor.dtype
    assert first.shape == tensor.shape
    assert driver.locked == {first.data_ptr(): tensor.nbytes, second.data_ptr(): tensor.nbytes}
    assert first.data_ptr() % mmap.PAGESIZE == 0  # two copies share no page, or the second could not be locked
    view, address = first.view(-1)[:1], first.data_ptr()
    del first
    gc.collect()
    assert address in driver.locked
    del view
    gc.collect()
    assert driver.locked == {second.data_ptr(): tensor.nbytes}


def test_a_refusal_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(2))
    with pytest.raises(UserError, match=r"CUDA error 2.*--ngram-table device"):
        pinned_copy(torch.ones(5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_reads_what_is_locked() -> None:
    tensor = torch.randn(1000, 1000, device="cuda")
    copy = pinned_copy(tensor)
    assert copy.is_pinned()
    assert torch.equal(copy.to("cuda", non_blocking=True), tensor)
