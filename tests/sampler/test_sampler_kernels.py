"""The sampler on its Triton kernels: the references' text, and in a captured graph the same bits as without."""

import pytest
import torch
from torch import Tensor

from stepfloor.kernels import accept_drafts, count_tokens, draw_tokens, match_drafts, process_logits
from stepfloor.request import SamplingParams
from stepfloor.sampler.sampler import Sampler
from tests.sampler.test_sampler import PROMPTS, REQUESTS, write

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no CUDA device")
@pytest.mark.parametrize("acceptance", ["standard", pytest.param("coupled", marks=pytest.mark.slow)])
def test_kernels_write_the_references_text(acceptance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages at once and a greedy neighbour, through the interpreter; no rounding closes gaps among 40 ids."""
    requests, prompts = [REQUESTS[0], REQUESTS[4]], [PROMPTS[0], PROMPTS[4]]
    wanted = write(requests, prompts, 2, acceptance, length=3)
    for module in (accept_drafts, count_tokens, draw_tokens, match_drafts, process_logits):
        monkeypatch.setattr(module, "runs_triton", lambda tensor: True)
    assert write(requests, prompts, 2, acceptance, length=3) == wanted


def step(sampler: Sampler, target: Tensor, drafter: Tensor, slots: Tensor, positions: Tensor, drafts: Tensor) -> Tensor:
    """Accept, commit and draft as Step does; returns all ids [B, 2 k + 2]."""
    emitted, accepted = sampler.accept(target, drafts, slots, positions)
    sampler.commit(slots, emitted)
    following = torch.empty_like(drafts[:, :0])
    for j in range(drafts.shape[1]):
        token = sampler.draft(drafter[:, j], slots, positions + accepted + 1 + j, following.unbind(1))
        following = torch.cat((following, token[:, None]), 1)
    return torch.cat((emitted, accepted[:, None], following), 1)


CASES = {
    "greedy": SamplingParams(temperature=0.0, seed=1),
    "temperature": SamplingParams(temperature=0.9, seed=2),
    "filters": SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=3),
    "top_p": SamplingParams(temperature=1.3, top_p=0.99, seed=4),
    "penalties": SamplingParams(temperature=1.0, presence_penalty=1.0, repetition_penalty=1.1, seed=5),
    "bias": SamplingParams(temperature=0.0, logit_bias=((7, 3.0),), forbidden_ids=(1, 2), seed=6),
}


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("acceptance", ["standard", "coupled", "forced"])
@pytest.mark.parametrize("name", CASES)
def test_a_graph_gives_the_bits_of_eager_steps(name: str, acceptance: str) -> None:
    """Settings change between replays, alone and beside others; every step from the same counts and proposals."""
    vocab_size, k, b = 248_320, 3, 4
    make = torch.Generator("cuda").manual_seed(0)

    def sampler() -> Sampler:
        forced = 2 if acceptance == "forced" else None
        made = Sampler(vocab_size, b, k, "standard" if forced else acceptance, "cuda", forced)
        for slot in range(b):
            made.assign(slot, CASES[name], (3, 4, 5))
        made.prepare(made.stages)
        return made

    def rows(*shape: int) -> Tensor:
        return (4 * torch.randn(*shape, vocab_size, generator=make, device="cuda")).bfloat16()

    target, drafter = rows(b, k + 1), rows(b, k)
    slots, positions = torch.arange(b, device="cuda"), torch.arange(b, device="cuda") + 50
    drafts = target[:, :k].float().argmax(-1)
    eager, captured, alone = sampler(), sampler(), sampler()
    held = [t.clone() for t in (target, drafter, slots, positions, drafts)]
    step(captured, *held)  # loads the kernels
    captured = sampler()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(captured, *held)
    for turn in range(4):
        if turn == 2:
            for made in (eager, captured, alone):
                made.release(1)
                made.assign(1, CASES["greedy"], ())
        result.fill_(-7)
        graph.replay()
        wanted = step(eager, target, drafter, slots, positions, drafts)
        assert torch.equal(result, wanted), f"step {turn}"
        one = slice(2, 3)
        own = step(alone, target[one], drafter[one], slots[one], positions[one], drafts[one])
        assert torch.equal(own[0], wanted[2]), f"step {turn}, alone"
        positions = positions + 1 + wanted[:, k + 1]
        drafts = wanted[:, k + 2 :].contiguous()
        for to, value in zip(held[3:], (positions, drafts), strict=True):
            to.copy_(value)


@pytest.mark.gpu
@GPU
def test_nothing_waits_for_the_device() -> None:
    """Joining, a step and leaving, under torch's own alarm for synchronisation."""
    made = Sampler(5000, 2, 2, "standard", "cuda")
    logits = torch.randn(1, 3, 5000, device="cuda")
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    for params in CASES.values():  # tables and kernels first
        made.assign(0, params, (1, 2), (3,))
        step(made, logits, logits, slots, slots + 9, slots[:, None].expand(1, 2).contiguous())
        made.release(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for params in CASES.values():
            made.assign(0, params, (1, 2), (3,))
            step(made, logits, logits, slots, slots + 9, slots[:, None].expand(1, 2).contiguous())
            made.release(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@GPU
def test_assignments_in_a_row_do_not_overwrite_each_other() -> None:
    """The copies are queued behind work that runs long, from memory that must not be used again before."""
    made = Sampler(5000, 16, 0, "coupled", "cuda")
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        busy = (busy @ busy).clamp(-1, 1)
    for turn in range(20):
        for slot in range(16):
            if turn:
                made.release(slot)
            made.assign(slot, SamplingParams(temperature=0.1 + 0.01 * slot + 0.001 * turn, seed=100 * turn + slot), ())
    torch.cuda.synchronize()
    assert made._seeds.tolist()[:16] == [1900 + slot for slot in range(16)]
    wanted = torch.tensor([0.119 + 0.01 * slot for slot in range(16)])
    assert torch.allclose(made._temperature[:16].cpu(), wanted)
