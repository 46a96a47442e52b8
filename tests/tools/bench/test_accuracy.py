"""An accuracy run against a server whose answers are scripted, and the figures that come of it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from stepfloor.errors import UserError
from stepfloor.tools.bench.accuracy import Plan, figures, judged, measure_accuracy, run_accuracy
from stepfloor.tools.bench.questions import Profile, Question, load_profile
from stepfloor.tools.bench.result import Item, Result
from stepfloor.tools.bench.speed import run_speed
from tests.tools.bench.stub_server import Script, stub

RIGHT = Question("sum/one", "1 + 1?", "number", "2")


def chat(text: str | None, **choice: Any) -> bytes:
    choices = [{"message": {"content": text}, "finish_reason": "stop", **choice}]
    return json.dumps({"choices": choices, "usage": {"completion_tokens": 3}}).encode()


def test_an_answer_is_judged_by_its_rule() -> None:
    item = judged(RIGHT, 200, chat("It is #### 2"))
    assert item == Item("sum/one", True, "2", "2", output_tokens=3, finish_reason="stop")
    assert not judged(RIGHT, 200, chat("It is #### 3")).correct


@pytest.mark.parametrize("data", [b"", b"{}", b'{"choices": []}', b'{"choices": [{"message": {}}]}', b"<html>"])
def test_what_is_no_answer_is_an_error_and_wrong(data: bytes) -> None:
    """A proxy's error page must not pass for an empty answer."""
    item = judged(RIGHT, 502, data)
    assert not item.correct
    assert item.error is not None
    assert item.error.startswith("status 502")


def test_an_empty_or_missing_text_is_no_answer_and_no_error() -> None:
    """A model that only thinks sends null."""
    for text in (None, ""):
        item = judged(RIGHT, 200, chat(text))
        assert (item.correct, item.answer, item.error) == (False, None, None)


def test_a_loop_is_noticed() -> None:
    assert judged(RIGHT, 200, chat("and then again " * 40)).looped


def test_the_figures_are_their_arithmetic() -> None:
    """7 of 10: 0.7, with Wilson's interval 0.397 to 0.892 (Wilson 1927; R: prop.test(7, 10, correct = FALSE))."""
    items = [Item(f"{'a' if i < 4 else 'b'}/{i}", i < 7, "x" if i else None, finish_reason="length") for i in range(10)]
    found = figures(items)
    assert found["accuracy"].value == 0.7
    assert (found["accuracy"].low, found["accuracy"].high) == pytest.approx((0.3968, 0.8922), abs=1e-4)
    assert found["accuracy_by_kind"].stats == {"a": 1.0, "b": 0.5}
    assert found["answered"].value == 0.9
    assert found["truncated"].count == 10
    assert figures([]) == {}


class Answers:
    """A client whose server answers from a table; `most` requests were in flight together at most."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts, self.bodies = texts, []
        self.now = self.most = 0
        self.url = "http://stub"

    async def fetch(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, b'{"data": [{"id": "stub"}]}'
        if body is None:
            return 404, b""
        self.bodies.append((path, body))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        asked = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        if asked == "fail":
            raise UserError("no answer from http://stub")
        return 200, chat(self.texts[asked])

    async def fetch_json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return None


def ask(client: Any, questions: list[Question], plan: Plan) -> Result:
    return asyncio.run(measure_accuracy(client, Profile("made", tuple(questions), 32), plan))


def test_a_run_keeps_every_item_in_the_order_of_the_set() -> None:
    questions = [Question(f"q/{i}", f"text {i}", "number", str(i)) for i in range(9)]
    client = Answers({f"text {i}": f"#### {i if i != 4 else 5}" for i in range(9)})
    result = ask(client, questions, Plan(concurrency=3, thinking=True))
    assert [i.id for i in result.items] == [q.id for q in questions]
    assert [i.id for i in result.items if not i.correct] == ["q/4"]
    assert client.most == 3
    assert result.valid
    assert all(body["temperature"] == 0.0 and body["max_tokens"] == 32 for _, body in client.bodies)
    assert client.bodies[0][1]["chat_template_kwargs"] == {"enable_thinking": True}
    assert result.load["set_sha256"] == Profile("made", tuple(questions), 32).digest


def test_failed_requests_make_the_result_invalid() -> None:
    """An accuracy of those that happened to be answered is another set's accuracy."""
    result = ask(
        Answers({"a": "#### 1"}), [Question("1", "a", "number", "1"), Question("2", "fail", "number", "1")], Plan()
    )
    assert [f.code for f in result.flags] == ["errors"]
    assert not result.valid
    assert result.metrics["accuracy"].value == 0.5


def test_a_run_that_is_stopped_keeps_what_it_has() -> None:
    async def stopped() -> Result:
        class Hangs(Answers):
            async def fetch(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
                if len(self.bodies) == 2:
                    await asyncio.sleep(60)
                return await super().fetch(method, path, body)

        questions = tuple(Question(str(i), "a", "number", "1") for i in range(5))
        client: Any = Hangs({"a": "#### 1"})
        task = asyncio.create_task(measure_accuracy(client, Profile("made", questions, 8), Plan(concurrency=1)))
        while len(client.bodies) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        task.cancel()
        return await task

    result = asyncio.run(stopped())
    assert len(result.items) == 2
    assert [(f.code, f.text) for f in result.flags] == [("partial", "2 of 5 questions were answered")]


def test_nobody_there_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"no answer from http://127\.0\.0\.1:9"):
        run_accuracy("http://127.0.0.1:9", load_profile("stdlib", items=1), Plan())
    with pytest.raises(UserError, match="--concurrency is at least 1"):
        run_accuracy("http://127.0.0.1:9", load_profile("stdlib", items=1), Plan(concurrency=0))


def test_the_speed_on_pinned_items(tmp_path: Path) -> None:
    """The same questions in every run, all of one length, warmed up with others (B09)."""
    profile = load_profile("stdlib")
    chat_items = Profile("", tuple(q for q in profile.questions if q.route == "chat"), 0).part(20)
    with stub(Script(first_ms=2, gap_ms=1)) as server:
        result = run_speed(server.url, profile, 20, tokens=12)
        asked = [served.body["messages"][0]["content"] for served in server.served]
    measured = asked[-20:]
    assert sorted(measured) == sorted(q.prompt for q in chat_items.questions)
    assert not set(asked[:-20]) & set(measured)
    assert {r.output_tokens for r in result.requests} == {12}
    assert all(served.body["temperature"] == 0.0 and served.body["ignore_eos"] for served in server.served)
    assert (result.load["set_sha256"], result.load["items"]) == (chat_items.digest, 20)
    assert result.load["concurrency"] == 1
    assert "accuracy" not in result.metrics
    again = Result.read(_written(result, tmp_path))
    assert again == result


def _written(result: Result, directory: Path) -> Path:
    result.write(directory / "speed.json")
    return directory / "speed.json"


def test_speed_needs_questions_to_warm_up_with() -> None:
    with pytest.raises(UserError, match="60 questions to measure beside 4 to warm up; got --items 64"):
        run_speed("http://127.0.0.1:9", load_profile("stdlib"), 64)
