"""The engine's process, run in this one: cancellation, deadlines, refusals, and a reader that does not read."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stepfloor
from stepfloor.config import EngineConfig
from stepfloor.engine import Engine
from stepfloor.request import Grammar, Request, SamplingParams
from stepfloor.server.wire import Frames, encode, encode_submit
from stepfloor.server.worker import Link, Worker, warm_up
from stepfloor.tokenizer.tokenizer import Tokenizer
from stepfloor.weights.checkpoint import open_checkpoint

SHIPPED = Path(stepfloor.__file__).parent / "shipped"


class Clock:
    """Time that only a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Side:
    """The HTTP side of the socket, and the worker at the other."""

    def __init__(self, engine: Engine) -> None:
        self.here, there = socket.socketpair()
        self.here.setblocking(False)
        self.engine = engine
        self.clock = Clock()
        self.worker = Worker(engine, Link(there), self.clock)
        self.frames = Frames()

    def send(self, *requests: Request, deadline_s: float | None = None) -> None:
        self.here.sendall(encode_submit(requests, deadline_s))

    def cancel(self, *ids: str) -> None:
        self.here.sendall(encode({"type": "cancel", "ids": ids}))

    def turn(self, count: int = 1) -> list[dict[str, Any]]:
        """Let the worker run, and read what it says; it must have something to do."""
        messages = []
        for _ in range(count):
            self.worker.turn()
            try:
                while True:
                    messages += [m for m, _ in self.frames.feed(self.here.recv(1 << 16))]
            except BlockingIOError:
                pass
        return [m for m in messages if m["type"] != "stats"]

    def idle(self) -> bool:
        scheduler = self.engine.scheduler
        pages = scheduler.allocator.num_pages - 1
        return not self.worker.open and not self.engine.has_work() and scheduler.allocator.num_free == pages


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig(max_num_seqs=2, max_model_len=256, max_num_queued_reqs=1)
    return Engine(open_checkpoint(SHIPPED), config, Tokenizer.load(SHIPPED))


@pytest.fixture
def side(engine: Engine) -> Iterator[Side]:
    one = Side(engine)
    yield one
    while engine.has_work():
        one.turn()
    assert one.idle()


def request(name: str, **fields: Any) -> Request:
    settings = {"sampling": SamplingParams(temperature=0.0, seed=0), "max_tokens": 200, **fields}
    return Request(name, (5, 6, 7), **settings)


def kinds(messages: list[dict[str, Any]]) -> list[str]:
    return [m["type"] for m in messages]


def pieces(messages: list[dict[str, Any]], name: str) -> list[Any]:
    return [p for m in messages if m["type"] == "pieces" for p in m["pieces"] if p[0] == name]


def test_a_cancelled_request_stops_within_two_steps(side: Side) -> None:
    """C-API-12, without the network: 30 rounds, and everything is back."""
    for round_number in range(30):
        name = f"r{round_number}"
        side.send(request(name, max_tokens=50))
        assert kinds(side.turn()) == ["accepted", "pieces"]  # the second says that it joined
        side.turn(round_number % 3)
        steps = side.engine.steps
        side.cancel(name)
        messages = side.turn(2)
        assert not pieces(messages, name)
        assert side.engine.steps - steps <= 2
    side.send(request("short", max_tokens=2))
    assert pieces(side.turn(4), "short")[-1][3] == "length"


def test_a_deadline(side: Side) -> None:
    side.send(request("slow"), deadline_s=5.0)
    side.send(request("free"))
    assert "accepted" in kinds(side.turn(3))
    side.clock.now = 4.9
    assert pieces(side.turn(2), "slow")
    side.clock.now = 5.0
    last = pieces(side.turn(2), "slow")[-1]
    assert last[3] == "cancelled"
    assert "deadline of 5 s" in last[5]
    assert pieces(side.turn(2), "free")
    side.cancel("free")


def test_a_full_queue_refuses_the_whole_group(side: Side) -> None:
    """max_num_seqs 2, one may wait: a group of two is refused when one place is left, and leaves nothing behind."""
    side.send(request("a"))
    side.send(request("b"))
    side.turn(2)
    side.send(request("c"), request("d"))
    (refused,) = [m for m in side.turn() if m["type"] == "refused"]
    assert (refused["ids"], refused["full"]) == (["c", "d"], True)
    side.send(request("e"))
    assert "accepted" in kinds(side.turn())
    side.cancel("a", "b", "e")


def test_a_bad_request_harms_nobody(side: Side) -> None:
    side.send(request("good", max_tokens=6))
    side.turn(2)
    bad = [
        replace(request("long"), token_ids=(1,) * 300),
        replace(request("foreign"), token_ids=(10**6,)),
        request("empty stop", stop=("",)),
        request("hot", sampling=SamplingParams(temperature=-1.0)),
        request("grammar", grammar=Grammar("regex", "([")),
        request("logprobs", logprobs=10**6),
    ]
    messages: list[dict[str, Any]] = []
    for one in bad:
        side.send(one)
    while side.worker.compiling or side.engine.has_work():
        messages += side.turn()
    refused = {m["ids"][0] for m in messages if m["type"] == "refused"}
    assert refused == {one.request_id for one in bad}
    assert pieces(messages, "good")[-1][3] == "length"


def test_a_group_with_one_bad_request_is_refused_as_a_whole(side: Side) -> None:
    side.send(request("one"), replace(request("two"), token_ids=()))
    assert kinds(side.turn()) == ["refused"]
    assert side.idle()


def test_a_reader_that_does_not_read_stops_no_step(side: Side) -> None:
    """The HTTP side hangs: steps go on, and it gets everything when it reads again."""
    side.here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    side.send(request("a", max_tokens=120, logprobs=20))
    side.worker.turn()
    turns = 0
    while side.engine.has_work():
        side.worker.turn()
        turns += 1
    assert turns < 130
    messages = []
    for _ in range(200):
        messages += side.turn() if side.engine.has_work() else []
        side.worker.link._flush()
        try:
            messages += [m for m, _ in side.frames.feed(side.here.recv(1 << 16))]
        except BlockingIOError:
            break
    tokens = sum(len(p[1]) for p in pieces(messages, "a"))
    assert tokens == 120 or pieces(messages, "a")[-1][3] == "stop"


def test_a_fault_in_taking_a_request_harms_nobody(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    side.send(request("good", max_tokens=6))
    side.turn(2)

    def broken(request: Request) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(side.engine, "submit", broken)
        side.send(request("bad"))
        (refused,) = [m for m in side.turn() if m["type"] == "refused"]
    assert refused["fault"]
    messages = []
    while side.engine.has_work():
        messages += side.turn()
    assert pieces(messages, "good")[-1][3] == "length"


def test_profiles_are_written_or_refused(side: Side, tmp_path: Path) -> None:
    def ask(start: bool, directory: Path) -> dict[str, Any]:
        side.here.sendall(encode({"type": "profile", "start": start, "directory": str(directory)}))
        (answer,) = side.turn()
        return answer

    taken = tmp_path / "file"
    taken.write_text("", encoding="utf-8")
    assert "start one first" in ask(False, tmp_path)["error"]
    for directory, works in ((taken, False), (tmp_path / "traces", True)):
        assert ask(True, directory)["error"] is None
        side.send(request("r", max_tokens=2))
        while side.turn() and side.engine.has_work():
            pass
        answer = ask(False, directory)
        assert (answer["error"] is None) is works
    assert Path(answer["path"]).is_file()


def test_the_process_ends_when_the_other_side_is_gone(engine: Engine) -> None:
    one = Side(engine)
    one.send(request("a"))
    one.turn()
    one.here.close()
    with pytest.raises(ConnectionError):
        one.worker.run()
    engine.cancel("a")
    while engine.has_work():
        engine.advance()


def test_the_warm_up_leaves_no_trace(engine: Engine) -> None:
    warm_up(engine)
    assert engine.stats()["steps"] == engine.stats()["delivered"] == 0
    assert not engine.has_work()
