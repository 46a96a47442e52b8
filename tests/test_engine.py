"""The engine against itself: who else is served, what was served before and how drafts fare never show in a text."""

from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.engine import Engine, host_memory
from stepfloor.errors import UserError
from stepfloor.kernels import gdn_decode as decode_room
from stepfloor.kernels import gdn_prefill as prefill_room
from stepfloor.kernels._torch import DeltaRows
from stepfloor.request import Batch, Chunk, Request, SamplingParams
from stepfloor.step.step import StepOutput
from stepfloor.weights.checkpoint import Checkpoint, open_checkpoint
from tests.oracle import Oracle
from tests.ours import engine_config
from tests.scripted import Served, collect, from_text, scripted_engine, serve

VOCAB, EOS = 97, 5
SHAPE = {
    "num_hidden_layers": 5,
    "hidden_size": 32,
    "num_experts": 6,
    "indexer_budget": 8,
    "max_position_embeddings": 4096,
}
GREEDY = SamplingParams(temperature=0.0, seed=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(Oracle(tmp_path_factory.mktemp("model"), 3, **SHAPE).directory)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def mixed_requests() -> list[Request]:
    """Five that differ in everything: length, limit, greedy or not, filters, penalties, bias."""
    settings = [
        GREEDY,
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, seed=2, top_k=9, top_p=0.9),
        SamplingParams(temperature=1.3, seed=3, presence_penalty=0.5, repetition_penalty=1.2, logit_bias=((EOS, 2.0),)),
        SamplingParams(temperature=0.0, seed=0, frequency_penalty=1.0, forbidden_ids=(0, 1)),
    ]
    sizes = ((3, 20), (17, 12), (9, 24), (1, 16), (30, 9))
    return [
        Request(f"r{i}", prompt(i, length), sampling, tokens)
        for i, (sampling, (length, tokens)) in enumerate(zip(settings, sizes, strict=True))
    ]


def alone(checkpoint: Checkpoint, requests: list[Request], **changes: object) -> dict[str, Served]:
    """What each request gets from an engine of its own."""
    out: dict[str, Served] = {}
    for request in requests:
        out |= serve(Engine(checkpoint, engine_config(**changes)), request)
    return out


@pytest.mark.parametrize("acceptance", ["standard", "coupled"])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_company_does_not_show(checkpoint: Checkpoint, k: int, acceptance: str) -> None:
    """Five at once in chunks of 7, joining and leaving at different steps: the same ids as alone in one chunk."""
    requests = mixed_requests()
    together = Engine(
        checkpoint,
        engine_config(spec_tokens=k, acceptance=acceptance, max_num_seqs=5, max_num_batched_tokens=7),
    )
    assert serve(together, *requests) == alone(checkpoint, requests, spec_tokens=k, acceptance=acceptance)


def test_the_hosts_memory_is_a_containers(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    assert host_memory(proc, cgroup) == {}
    for directory in (proc, cgroup):
        directory.mkdir()
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 90 kB\n")
    assert host_memory(proc, cgroup)["MemAvailable"] == 90 * 1024
    (cgroup / "memory.max").write_text("40960\n")
    (cgroup / "memory.current").write_text("1024\n")
    assert host_memory(proc, cgroup) == {"MemTotal": 100 * 1024, "MemAvailable": 39 * 1024}


def test_fewer_pages_than_slots_could_fill(checkpoint: Checkpoint) -> None:
    """Requests wait for pages, and each gets what it gets alone."""
    requests = mixed_requests()
    config = engine_config(spec_tokens=1, max_num_seqs=5, block_size=16)
    pages = config.pages_per_sequence
    engine = Engine(checkpoint, replace(config, num_gpu_blocks_override=pages))
    most = max(-(-(len(r.token_ids) + r.max_tokens) // 16) for r in requests)
    assert most < pages < sum(-(-(len(r.token_ids) + r.max_tokens) // 16) for r in requests)
    assert serve(engine, *requests) == alone(checkpoint, requests, spec_tokens=1)
    assert engine.stats()["kv_cache_usage"] == 0
    assert engine.report()["pages"] == pages


@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_joining_mid_stream_and_too_few_slots(checkpoint: Checkpoint, k: int) -> None:
    """Requests arrive while others are in the middle, wait for a slot, and take one that was just left."""
    requests = [replace(request, sampling=GREEDY) for request in mixed_requests()]
    engine = Engine(checkpoint, engine_config(spec_tokens=k, max_num_seqs=2, max_num_batched_tokens=4))
    served = {request.request_id: Served([], "", None) for request in requests}
    late = iter(requests)
    engine.submit(next(late))
    for number, piece in enumerate(engine.run()):
        collect([piece], served)
        if number % 4 == 1 and (request := next(late, None)) is not None:
            engine.submit(request)
    assert next(late, None) is None
    assert served == alone(checkpoint, requests, spec_tokens=0)


def test_coupled_text_is_the_same_for_every_k(checkpoint: Checkpoint) -> None:
    requests = mixed_requests()
    texts = [
        serve(Engine(checkpoint, engine_config(spec_tokens=k, acceptance="coupled", max_num_seqs=5)), *requests)
        for k in (0, 1, 2, 3, 5, 7)
    ]
    assert all(text == texts[0] for text in texts)
    # and when most drafts are accepted, which random weights do not give
    first = requests[1]
    text = [*first.token_ids, *texts[0][first.request_id].ids]
    for k in (2, 5):
        config = engine_config(spec_tokens=k, acceptance="coupled")
        engine = scripted_engine(checkpoint, config, from_text(text, k, 0.8, k, VOCAB, EOS))
        assert serve(engine, first)[first.request_id] == texts[0][first.request_id]
        assert engine.counters.delivered_per_step > 1.5


def test_greedy_text_is_the_same_for_every_k(checkpoint: Checkpoint) -> None:
    request = Request("r", prompt(8, 11), GREEDY, 20)
    texts = [alone(checkpoint, [request], spec_tokens=k, max_num_batched_tokens=3 + k)["r"] for k in range(8)]
    assert all(text == texts[0] for text in texts)


def test_fewer_drafts_while_many_decode(checkpoint: Checkpoint) -> None:
    """Drafts follow the number of sequences from step to step; greedy text stays; only drafts there were count."""
    requests = [replace(request, sampling=GREEDY) for request in mixed_requests()]
    ranges = ((1, 1, 3), (2, 3, 0), (4, 4, 2))
    config = engine_config(spec_tokens=3, spec_tokens_per_batch_size=ranges, max_num_seqs=5)
    engine = Engine(checkpoint, config)
    batches: list[tuple[int, int]] = []
    run = engine.step.run

    def noted(batch: Batch, *rest: Any) -> StepOutput:
        if batch.decodes:
            batches.append((len(batch.decodes), batch.spec_tokens))
        return run(batch, *rest)

    engine.step.run = noted  # type: ignore[method-assign]
    assert serve(engine, *requests) == alone(checkpoint, requests, spec_tokens=0)
    assert all(k == config.drafts(count) for count, k in batches)
    assert len({k for _, k in batches}) > 2
    assert engine.counters.drafted[0] > engine.counters.drafted[2] > 0
    assert engine.counters.drafted[2] <= sum(k == 3 for _, k in batches) * 5


def test_seeds(checkpoint: Checkpoint) -> None:
    """The same seed is the same text, another seed another; without one the engine chooses, differently each time."""
    base = Request("r", prompt(1, 5), SamplingParams(temperature=1.0, seed=11), 12)

    def ids(seed: int | None) -> list[int]:
        request = replace(base, sampling=replace(base.sampling, seed=seed))
        return serve(Engine(checkpoint, engine_config(spec_tokens=2)), request)["r"].ids

    assert ids(11) == ids(11)
    assert len({tuple(ids(seed)) for seed in (11, 12, 11 + 2**32, None, None)}) == 5


def held(engine: Engine) -> tuple[object, ...]:
    """Everything a request takes and must give back."""
    scheduler = engine.scheduler
    return (
        sorted(scheduler.free_slots),
        scheduler.allocator.num_free,
        len(scheduler.running) + len(scheduler.waiting),
        len(engine.stream._texts),
        len(engine.step.sampler._stages),
        len(engine.pieces),
        engine.under_way,
    )


def test_a_cancelled_request_stops_and_gives_everything_back(checkpoint: Checkpoint) -> None:
    """C-API-12: 200 rounds of a long request that is cancelled, and a short one; then all is as it was."""
    engine = Engine(checkpoint, engine_config(spec_tokens=1, max_num_seqs=2))
    short = Request("short", prompt(3, 2), SamplingParams(temperature=1.0, seed=4), 2)
    expected = serve(engine, short)["short"]
    before = held(engine)
    for number in range(200):
        engine.submit(Request("long", prompt(4, 2), GREEDY, 100))
        if number % 3:
            taken = list(islice(engine.run(), number % 3))
            assert {piece.request_id for piece in taken} == {"long"}
        engine.submit(short)
        engine.cancel("long")
        steps = engine.counters.decode_steps
        served = {"short": Served([], "", None)}
        collect(engine.run(), served)  # a piece of the cancelled one would not be found here
        assert served["short"] == expected
        assert engine.counters.decode_steps - steps <= 2
        assert held(engine) == before


@pytest.mark.parametrize("at", [0, 7, 14])
def test_a_prompt_that_runs_out_of_memory_ends_alone(
    checkpoint: Checkpoint, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first chunk, in the middle, in the last: an error for this request, and the ids of old for all others."""
    engine = Engine(checkpoint, engine_config(spec_tokens=2, max_num_seqs=2, max_num_batched_tokens=7))
    others = [Request(f"r{i}", prompt(30 + i, 9), GREEDY, 12) for i in range(3)]
    large = Request("large", prompt(40, 17), GREEDY, 6)
    expected = alone(checkpoint, [*others, large], spec_tokens=2)
    before = held(engine)
    prefill, full = engine.step._prefill, [True]

    def limited(chunk: Chunk, k: int) -> torch.Tensor | None:
        if chunk.token_ids == large.token_ids[at : at + 7] and full.pop():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words.")
        return prefill(chunk, k)

    monkeypatch.setattr(engine.step, "_prefill", limited)
    for request in (others[0], large, *others[1:]):
        engine.submit(request)
    pieces = list(engine.run())
    (failed,) = [piece for piece in pieces if piece.request_id == "large"]
    assert failed.finish_reason == "error"
    assert failed.error == "the prompt could not be read: CUDA out of memory. Tried to allocate 2.00 GiB.; others go on"
    served = collect(
        [piece for piece in pieces if piece.request_id != "large"], {r.request_id: Served([], "", None) for r in others}
    )
    assert served == {r.request_id: expected[r.request_id] for r in others}
    assert held(engine) == before
    full.append(False)
    assert serve(engine, large)["large"] == expected["large"]


def test_a_request_can_be_cancelled_between_two_pieces_of_one_step(checkpoint: Checkpoint) -> None:
    """The second piece was made before the first was taken; it must not come, and must not crash the loop."""
    engine = Engine(checkpoint, engine_config(spec_tokens=0, max_num_seqs=2))
    a, b = (Request(name, prompt(i, 4), GREEDY, 12) for i, name in enumerate("ab"))
    engine.submit(a)
    engine.submit(b)
    served = {name: Served([], "", None) for name in "ab"}
    cancelled = False
    for piece in engine.run():
        assert not (cancelled and piece.request_id == "b")
        collect([piece], served)
        if piece.request_id == "a" and served["b"].ids and not cancelled:
            engine.cancel("b")
            cancelled = True
    assert cancelled
    assert served["a"] == alone(checkpoint, [a], spec_tokens=0)["a"]


@pytest.mark.parametrize("k", [0, 3])
def test_a_request_id_can_be_used_again_at_once(checkpoint: Checkpoint, k: int) -> None:
    """Its old step is still under way in the same slot; what it emits belongs to nobody."""
    engine = Engine(checkpoint, engine_config(spec_tokens=k))
    first, second = Request("r", prompt(1, 6), GREEDY, 30), Request("r", prompt(2, 5), GREEDY, 10)
    expected = alone(checkpoint, [second], spec_tokens=k)["r"]
    for ending in ("cancel", "stop"):
        ids = alone(checkpoint, [first], spec_tokens=0)["r"].ids
        stop = (next(i for i in ids[4:] if i not in ids[:4]),) if ending == "stop" else ()
        engine.submit(replace(first, stop_token_ids=stop))
        pieces = engine.run()
        for piece in pieces:
            if ending == "cancel" and len(piece.token_ids):
                engine.cancel("r")
                break
            if piece.finish_reason is not None:
                break
        engine.submit(second)
        served = {"r": Served([], "", None)}
        assert collect(pieces, served)["r"] == expected


def test_a_run_that_was_left_goes_on_where_it_was(checkpoint: Checkpoint) -> None:
    """A consumer that breaks out of the loop and comes back must not lose the step that was under way."""
    request = Request("r", prompt(1, 6), GREEDY, 20)
    engine = Engine(checkpoint, engine_config(spec_tokens=2))
    engine.submit(request)
    served = {"r": Served([], "", None)}
    while served["r"].finish_reason is None:
        collect(list(islice(engine.run(), 1)), served)
    assert served == alone(checkpoint, [request], spec_tokens=2)


@torch.inference_mode()
def poison(engine: Engine) -> None:
    """NaN in every cache, nonsense in every index that a request does not bring itself."""
    cache, step = engine.step.cache, engine.step
    for name in (field.name for field in fields(cache)):
        value = getattr(cache, name)
        for tensor in value if isinstance(value, list) else [value]:
            tensor.fill_(torch.nan if tensor.is_floating_point() else tensor.shape[0])
    for tensor in (
        step.state.token,
        step.state.length,
        step.state.drafts,
        step.state.pending,
        step.state.rejected,
        step.state.history,
    ):
        tensor.random_(0, 90, generator=torch.Generator().manual_seed(0))
    if step.sampler.proposals is not None:
        step.sampler.proposals.logits.fill_(torch.nan)
        step.sampler.proposals.scale.fill_(torch.nan)


@pytest.mark.parametrize("k", [0, 3])
def test_poisoned_memory_does_not_show(checkpoint: Checkpoint, k: int) -> None:
    """C-STATE-05: one long request poisoned every later one. Whatever memory held before, a text is the same."""
    requests = mixed_requests()
    config = engine_config(spec_tokens=k, max_num_seqs=2, max_num_batched_tokens=6)
    clean = serve(Engine(checkpoint, config), *requests)
    engine = Engine(checkpoint, config)
    for _ in range(2):
        poison(engine)
        assert serve(engine, *requests) == clean


def test_a_long_request_leaves_nothing_behind(checkpoint: Checkpoint) -> None:
    short, long = Request("a", prompt(1, 5), GREEDY, 16), Request("long", prompt(2, 140), GREEDY, 20)
    engine = Engine(checkpoint, engine_config(spec_tokens=3))
    before = serve(engine, short)
    serve(engine, long)
    assert serve(engine, short) == before


def test_a_sampled_request_leaves_no_setting_behind(checkpoint: Checkpoint) -> None:
    """A slot's noise, filters and penalties end with its request, not with the next one's join."""
    engine = Engine(checkpoint, engine_config(spec_tokens=1, max_num_seqs=5))
    serve(engine, *mixed_requests())
    assert not engine.step.sampler.stages


class Letters:
    """A tokenizer that needs no file: each id is one or two letters."""

    special_ids = frozenset({EOS})

    def token_bytes(self, token: int) -> bytes:
        return bytes([97 + token % 26]) + (b"" if token < 50 else bytes([65 + token % 26]))


@pytest.mark.parametrize("k", [0, 3])
def test_stop_strings_end_the_text_and_the_sequence(checkpoint: Checkpoint, k: int) -> None:
    """A stop string across two tokens of one window: nothing of it is shown, nothing after it is counted."""
    request = Request("r", prompt(1, 6), GREEDY, 24)
    tokenizer = Letters()
    whole = serve(Engine(checkpoint, engine_config(spec_tokens=0), tokenizer), request)["r"]  # type: ignore[arg-type]
    assert whole.text == b"".join(map(tokenizer.token_bytes, (i for i in whole.ids if i != EOS))).decode()
    stop = whole.text[9:12]
    cut = whole.text.index(stop)
    continuation = [*request.token_ids, *whole.ids]
    engine = Engine(checkpoint, engine_config(spec_tokens=k, max_num_seqs=2), tokenizer)  # type: ignore[arg-type]
    if k:
        # every draft is right, so that the string ends inside a window
        engine.step = scripted_engine(checkpoint, engine.config, from_text(continuation, k, 1.0, 0, VOCAB, EOS)).step
    served = serve(engine, replace(request, stop=("never so", stop)))["r"]
    assert served.text == whole.text[:cut]
    assert served.finish_reason == "stop"
    shown = next(n for n in range(25) if stop in b"".join(map(tokenizer.token_bytes, whole.ids[:n])).decode())
    assert served.ids == whole.ids[:shown]
    # the first token is the prompt's; C-SPEC-03: what follows the end is not counted
    assert engine.counters.delivered == shown - 1
    assert len(engine.scheduler.free_slots) == 2


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"token_ids": ()}, "the prompt is empty"),
        ({"token_ids": (1,) * 160}, r"the prompt has 160 tokens and the context is 160 \(--max-model-len\)"),
        ({"token_ids": (1, 97)}, "token ids must be 0 to 96; the prompt holds 97"),
        ({"token_ids": (-1,)}, "token ids must be 0 to 96; the prompt holds -1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1; got 0"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "temperature must be between 0.0 and inf; got -1.0"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature must be between"),
        ({"sampling": SamplingParams(top_p=0.0)}, "top_p and repetition_penalty must be above 0"),
        ({"sampling": SamplingParams(top_k=-2)}, "top_k must be -1"),
        ({"sampling": SamplingParams(logit_bias=((97, 1.0),))}, "token ids must be 0 to 96; got 97"),
        ({"stop": ("x",)}, "stop strings need a tokenizer"),
        ({"request_id": "running"}, "request ids must differ; 'running' is running"),
    ],
)
def test_refusals_leave_nothing_behind(checkpoint: Checkpoint, change: dict[str, object], wanted: str) -> None:
    """A refused request once stayed in the queue, and its text came out for nobody."""
    engine = Engine(checkpoint, engine_config(spec_tokens=1, max_num_seqs=2))
    running = Request("running", prompt(1, 3), GREEDY, 4)
    engine.submit(running)
    before = held(engine)
    with pytest.raises(UserError, match=wanted):
        engine.submit(replace(Request("new", (1, 2), GREEDY, 4), **change))
    assert held(engine) == before
    served = {"running": Served([], "", None)}
    assert collect(engine.run(), served) == alone(checkpoint, [running], spec_tokens=1)


@pytest.mark.parametrize("length", [158, 159])
def test_a_prompt_that_just_fits(checkpoint: Checkpoint, length: int) -> None:
    """C-API-10: no prompt token is dropped, and the context is filled to its last position."""
    request = Request("r", prompt(1, length), GREEDY, 50)
    served = alone(checkpoint, [request], spec_tokens=7)["r"]
    assert len(served.ids) == 160 - length
    assert served.finish_reason == "length"
    assert served == alone(checkpoint, [request], spec_tokens=0)["r"]


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 3])
def test_two_thousand_tokens(checkpoint: Checkpoint, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """K14: a long run ends in no non-finite value, and float32 state stays beside a float64 replay of its operands.

    A row of the delta rule rounds a state element four times (decay, product, error, sum), each 2**-24 of the largest
    element M; what it leaves decays by the rows that follow, and unit keys with beta up to 1 never amplify it. So the
    error is below 4 * 2**-24 * M * (1 + d + d**2 + ...), d the largest decay met, and the sum at most the rows.
    """
    exact: dict[int, tuple[Tensor, float, int]] = {}
    plain_rule = decode_room.delta_rule

    def replay(rows: DeltaRows, layer: int, start: int, stop: int) -> None:
        state, decay, count = exact[layer]
        for t in range(start, stop):
            state = state * rows.log_decay[t].double().exp()[:, None, None]
            decay = max(decay, float(rows.log_decay[t].max().exp()))
            key = rows.key[t].double().unsqueeze(1)
            error = rows.value[t].double() - torch.bmm(key, state).squeeze(1)
            state = torch.baddbmm(state, key.transpose(1, 2), (rows.beta[t].double()[:, None] * error).unsqueeze(1))
        exact[layer] = state, decay, count + stop - start

    def rule(rows: DeltaRows, state: Tensor, start: int, stop: int) -> Tensor:
        # a state that is kept lies in the cache; the rows on trial run on a copy
        layer = next((i for i, kept in enumerate(cache.state) if kept[0].data_ptr() == state.data_ptr()), None)
        if layer is not None:
            replay(rows, layer, start, stop)
        return plain_rule(rows, state, start, stop)

    monkeypatch.setattr(decode_room, "delta_rule", rule)
    monkeypatch.setattr(prefill_room, "delta_rule", rule)
    engine = Engine(checkpoint, engine_config(spec_tokens=k, max_model_len=2100))
    cache = engine.step.cache
    exact.update({i: (kept[0].double(), 0.0, 0) for i, kept in enumerate(cache.state)})
    served = serve(engine, Request("r", prompt(1, 40), GREEDY, 2000))["r"]
    assert len(served.ids) == 2000
    assert served.finish_reason == "length"
    for layer, (state, decay, count) in exact.items():
        kept = cache.state[layer][0]
        assert torch.isfinite(kept).all()
        assert count > 2000
        remembered = min(count, 1 / (1 - decay)) if decay < 1 else count
        bound = 4 * 2.0**-24 * float(state.abs().max()) * remembered
        error = float((kept.double() - state).abs().max())
        print(f"layer {layer}: {count} rows, largest decay {decay:.6f}, error {error:.1e} of {bound:.1e}")
        assert error <= bound


@pytest.mark.parametrize(
    ("device", "words"), [("cuda:9", "finds . CUDA devices"), ("tpu", "must be cpu, cuda or cuda:N"), ("cuda:x", "got")]
)
def test_a_device_that_is_not_there_is_one_sentence(checkpoint: Checkpoint, device: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Engine(checkpoint, engine_config(device=device))
