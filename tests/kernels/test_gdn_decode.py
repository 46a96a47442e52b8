"""The gated delta net over decode steps: replayed rows, rejected rows, states written once."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from stepfloor.kernels.gdn_decode import gdn_decode, gdn_decode_inputs
from tests.kernels.compare import UNIT, assert_rounded_alike, assert_same, assert_within, copied
from tests.kernels.delta_net import DeltaNet, constants_of, projected_rows, rule_bound
from tests.kernels.source import Recording

DTYPES = [torch.float32, torch.bfloat16]
TENSORS = ("state", "raw_rows", "gate_rows")


def odd_inputs(b: int, r: int, dtype: torch.dtype) -> dict[str, Any]:
    return gdn_decode_inputs(b, r, 2, 6, 5, 7, dtype, "cpu")


def net_of(inputs: dict[str, Any], slots: int, rows: int, dtype: torch.dtype) -> DeltaNet:
    return DeltaNet(inputs["constants"], slots, rows, dtype)


@pytest.mark.parametrize("prompt", [1, 2, 3, 20])
def test_steps_after_a_prompt_are_the_sources(recording: Recording, prompt: int) -> None:
    """Prompts shorter than the convolution's history too: what is missing reads as zero."""
    prefix = "layers.0.linear_attn"
    module = recording.module(prefix)
    net = DeltaNet(constants_of(module), 1, 1, recording.dtype)
    projected, x = projected_rows(recording, 0), recording.into(prefix)
    cache = DynamicCache(config=recording.config)
    seen: list[torch.Tensor] = []
    hook = module.out_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0]))
    with torch.no_grad():
        module(x[None, :prompt], cache=cache)
        for t in range(prompt, prompt + 12):
            module(x[None, t : t + 1], cache=cache)
    hook.remove()
    ours = [net.prefill(0, projected[:prompt])]
    for t in range(prompt, prompt + 12):
        ours.append(net.window([0], projected[None, t : t + 1], [int(t > prompt)])[0])
    wanted, got = torch.cat(seen), torch.cat(ours)
    heads = net.state.shape[1]
    largest = wanted.double().abs().unflatten(-1, (heads, -1)).amax(-1, keepdim=True)
    # as for the prompt: the rule's roundings on both sides; in bf16 six places that may fall a step aside, and one
    # more since the source's products of one row need not have the bits of its products of many
    share = 2 * 10 * rule_bound(prompt + 12, net.state.shape[2], 1.0) + 2 * x.shape[1] * 2.0**-24 * 10
    if recording.dtype == torch.bfloat16:
        share += 7 * 2 * UNIT[torch.bfloat16]
    assert_within(got, wanted, (share * largest).expand(-1, heads, wanted.shape[1] // heads).flatten(1))
    assert_rounded_alike(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_replayed_rows_equal_plain_running(dtype: torch.dtype, seed: int) -> None:
    """Windows with random rejected tails; outputs of accepted rows and the states behind them have plain bits."""
    draw = random.Random(seed)
    inputs, width = odd_inputs(1, 1, dtype), 4
    columns = inputs["projected"].shape[2]
    make = torch.Generator().manual_seed(seed)
    text = torch.randn(40, columns, generator=make).to(dtype)
    plain, net = (net_of(inputs, 2, width, dtype) for _ in range(2))
    prompt = draw.randint(1, 9)
    wanted = plain.prefill(1, text)
    assert_same(net.prefill(1, text[:prompt]), wanted[:prompt])
    at, pending = prompt, 0
    while at < len(text):
        # some sequences stop drafting early, so windows have any number of rows
        good = draw.randint(1, min(width, len(text) - at))
        rows = draw.randint(good, width)
        junk = torch.randn(rows - good, columns, generator=make).to(dtype)
        before = net_of(inputs, 2, width, dtype)
        before.prefill(1, text[:at])
        output = net.window([1], torch.cat((text[at : at + good], junk))[None], [pending])[0]
        assert_same(output[:good], wanted[at : at + good])
        # the state holds exactly what was committed before this window: its own rows have not touched it
        assert_same(net.state[1], before.state[1])
        at, pending = at + good, good
    assert_same(net.state[0], torch.zeros_like(net.state[0]))


def test_nothing_is_replayed_after_a_prompt() -> None:
    inputs = odd_inputs(2, 3, torch.float32)
    inputs["pending"] = torch.zeros(2, dtype=torch.int64)
    before = inputs["state"].clone()
    gdn_decode(**inputs)
    assert_same(inputs["state"], before)


def test_a_step_may_run_again() -> None:
    """With no row accepted the next window starts from the same history and state."""
    inputs = odd_inputs(2, 3, torch.float32)
    first = gdn_decode(**inputs)
    assert_same(gdn_decode(**{**inputs, "pending": torch.zeros(2, dtype=torch.int64)}), first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequences_together_equal_each_alone(dtype: torch.dtype) -> None:
    """Slots in any order, any number of pending rows each; slots outside the batch keep their bytes."""
    inputs = gdn_decode_inputs(5, 3, 2, 6, 5, 7, dtype, "cpu")
    inputs["slots"] = torch.tensor([4, 1, 5, 2, 3])
    inputs["pending"] = torch.tensor([0, 3, 1, 2, 3])
    together = copied(inputs)
    output = gdn_decode(**together)
    for b in range(5):
        alone = copied(inputs)
        for name in ("projected", "slots", "pending"):
            alone[name] = inputs[name][b : b + 1]
        assert_same(gdn_decode(**alone)[0], output[b])
        slot = int(inputs["slots"][b])
        others = [s for s in range(6) if s != slot]
        for name in TENSORS:
            assert_same(alone[name][slot], together[name][slot])
            assert_same(alone[name][others], inputs[name][others])


def test_window_shorter_than_the_buffers() -> None:
    """R rows in buffers for more: what lies behind them is neither read nor written."""
    inputs = odd_inputs(1, 4, torch.float32)
    poisoned = copied(inputs)
    poisoned["pending"] = inputs["pending"] = torch.tensor([2])
    poisoned["raw_rows"][:, 3 + 2 :] = torch.nan
    poisoned["gate_rows"][:, 2:] = torch.nan
    for values in (inputs, poisoned):
        values["projected"] = values["projected"][:, :2]
    assert_same(gdn_decode(**poisoned), gdn_decode(**inputs))
    assert bool(poisoned["raw_rows"][1, 3 + 2 :].isnan().all())
    assert bool(poisoned["gate_rows"][1, 2:].isnan().all())


def test_state_stays_float32_in_bf16_models() -> None:
    """A state rounded to bf16 drifts over long outputs: a decay of 1 - 2**-9 would never shrink it."""
    inputs = odd_inputs(1, 1, torch.bfloat16)
    inputs["projected"] = torch.zeros_like(inputs["projected"])
    net = net_of(inputs, 1, 1, torch.bfloat16)
    net.state.fill_(1.0)
    net.constants = replace(net.constants, a_log=torch.full((6,), -6.0))
    for step in range(100):
        net.window([0], inputs["projected"], [int(step > 0)])
    assert net.state.dtype == torch.float32
    # beta is a half but every key is zero, so the state decays: exp(-99 e**-6 log(1 + e**1))
    expected = torch.exp(-99 * torch.exp(torch.tensor(-6.0)) * torch.tensor(1.0).exp().log1p())
    # 99 products, and the decay itself a few roundings off each time
    assert_within(net.state, expected.expand_as(net.state), 99 * 8 * 2.0**-24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projected": torch.zeros(2, 4, 118)}, "holds 3 pending rows a sequence; got 4"),
        ({"projected": torch.zeros(2, 3, 20)}, r"\[B, R, 116\].*got \(2, 3, 20\)"),
        ({"slots": torch.tensor([1])}, r"\(2, 3, 116\), \(1,\), \(2,\)"),
        ({"pending": torch.tensor([1, 1, 1])}, r"\(2, 3, 116\), \(2,\), \(3,\)"),
    ],
)
def test_disagreeing_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    inputs = odd_inputs(2, 3, torch.float32)
    assert inputs["projected"].shape[2] == 116
    with pytest.raises(ValueError, match=message):
        gdn_decode(**{**inputs, **change})
