"""The openai and anthropic packages against a running server: every answer is that of an unstreamed, undrafted run."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.server.live import Live, serving

MODEL = "stepfloor-small"
HI = [{"role": "user", "content": "What is a list in Python?"}]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"enum": ["a.py", "b.py"]}, "deep": {"type": "boolean"}},
            "required": ["path", "deep"],
            "additionalProperties": False,
        },
    },
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "size": {"enum": ["small", "large"]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, "--max-num-seqs", "4", "--max-model-len", "1024", "--enable-log-requests") as server:
        yield server
        server.until_idle()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a server that drafts nothing."""
    log = tmp_path_factory.mktemp("plain") / "log"
    with serving(log, "--max-num-seqs", "2", "--max-model-len", "1024", "--spec-tokens", "0") as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", timeout=120, max_retries=0)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "stops": {"temperature": 0, "stop": ["list", "\n\n"]},
    "penalties": {"temperature": 0, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    "bias": {"temperature": 0, "logit_bias": {"200": 3.0, "201": -100.0}},
    "extra": {
        "temperature": 0,
        "extra_body": {
            "repetition_penalty": 1.2,
            "min_p": 0.02,
            "top_k": 7,
            "ignore_eos": True,
            "min_tokens": 3,
            "stop_token_ids": [199],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        },
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_chat_streamed_drafted_or_neither(client: openai.OpenAI, plain: openai.OpenAI, name: str) -> None:
    settings = {"model": MODEL, "messages": HI, "max_tokens": 24, **SETTINGS[name]}
    expected = plain.chat.completions.create(**settings)
    whole = client.chat.completions.create(**settings)
    content = reasoning = ""
    usage = reason = None
    for chunk in client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            reason = choice.finish_reason or reason
        usage = chunk.usage or usage
    message = expected.choices[0].message
    assert whole.choices[0].message.content == content == message.content
    assert whole.choices[0].message.reasoning_content == (reasoning or None) == message.reasoning_content
    assert whole.choices[0].finish_reason == reason == expected.choices[0].finish_reason
    assert whole.usage == usage == expected.usage
    assert usage.completion_tokens <= 24


def test_completions(client: openai.OpenAI, plain: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "temperature": 0}
    prompts = ["def main", "import os\n"]
    expected = plain.completions.create(prompt=prompts, logprobs=3, **settings)
    whole = client.completions.create(prompt=prompts, logprobs=3, **settings)
    assert [c.text for c in whole.choices] == [c.text for c in expected.choices]
    assert [c.logprobs.tokens for c in whole.choices] == [c.logprobs.tokens for c in expected.choices]
    for mine, other in zip(whole.choices, expected.choices, strict=True):
        # decode rows have the same bits for every k on the CPU
        assert mine.logprobs.token_logprobs == other.logprobs.token_logprobs
        assert "".join(mine.logprobs.tokens) == mine.text
    texts = ["", ""]
    for chunk in client.completions.create(prompt=prompts, stream=True, **settings):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in expected.choices]
    echoed = client.completions.create(prompt="def main", echo=True, **settings)
    assert echoed.choices[0].text == "def main" + expected.choices[0].text


def test_n_and_seed(client: openai.OpenAI) -> None:
    """Answers of one request differ, and are the same in every run with one seed."""
    settings: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 12, "n": 3, "seed": 7, "temperature": 1.2}
    runs = [client.chat.completions.create(**settings, extra_body=OFF) for _ in range(2)]
    texts = [[c.message.content for c in run.choices] for run in runs]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    prompt = client.chat.completions.create(**{**settings, "n": 1}, extra_body=OFF).usage.prompt_tokens
    assert runs[0].usage.prompt_tokens == prompt
    assert [c.index for c in runs[0].choices] == [0, 1, 2]


def test_logprobs(client: openai.OpenAI, plain: openai.OpenAI) -> None:
    """C-SPEC-08, streamed and not, with drafts and without."""
    settings: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 16, "temperature": 0, "logprobs": True}
    settings |= {"top_logprobs": 5, "extra_body": OFF}
    expected = plain.chat.completions.create(**settings).choices[0]
    entries = [x.model_dump() for x in expected.logprobs.content]
    assert [x.model_dump() for x in client.chat.completions.create(**settings).choices[0].logprobs.content] == entries
    streamed = [
        x.model_dump()
        for chunk in client.chat.completions.create(**settings, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for x in choice.logprobs.content
    ]
    assert streamed == entries
    assert all(x["logprob"] < 0 and len(x["top_logprobs"]) == 5 for x in entries)
    assert bytes(b for x in entries for b in x["bytes"]).decode().startswith(expected.message.content)


@pytest.mark.parametrize("thinking", [True, False])
def test_json_schema(client: openai.OpenAI, thinking: bool) -> None:
    """With drafts, streamed; with reasoning the schema binds what comes after it."""
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY, "strict": True}}
    body = {"chat_template_kwargs": {"enable_thinking": thinking}}
    if thinking:  # the small model does not end its reasoning soon by itself
        body["logit_bias"] = {str(end_of_thinking(client)): 30.0}
    content = ""
    reason = None
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=120, temperature=0, response_format=schema, extra_body=body, stream=True
    )
    for chunk in stream:
        content += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    place = json.loads(content)
    assert set(place) == {"city", "size"}
    assert reason == "stop"


def end_of_thinking(client: openai.OpenAI) -> int:
    url = str(client.base_url).removesuffix("/v1/")
    (token,) = httpx2.post(f"{url}/tokenize", json={"prompt": "</think>"}, timeout=60).json()["tokens"]
    return token


def test_json_object_and_other_grammars(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 100, "temperature": 0}
    for outputs, check in (
        ({"regex": "[0-9]{3}"}, str.isdecimal),
        ({"choice": ["yes", "no"]}, ("yes", "no").__contains__),
        ({"grammar": 'root ::= "a" [bc]+ "d"'}, lambda text: text[0] + text[-1] == "ad"),
        ({"json": CITY}, lambda text: set(json.loads(text)) == {"city", "size"}),
    ):
        answer = client.chat.completions.create(**settings, extra_body={**OFF, "structured_outputs": outputs})
        text = answer.choices[0].message.content
        assert check(text) or answer.choices[0].finish_reason == "length", (outputs, text)


@pytest.mark.parametrize(
    ("stream", "choice"), [(False, "required"), (True, {"type": "function", "function": {"name": "look"}})]
)
def test_a_call_that_must_be_made(client: openai.OpenAI, stream: bool, choice: Any) -> None:
    settings: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 150, "temperature": 0, "tools": [LOOK]}
    settings |= {"tool_choice": choice, "parallel_tool_calls": False, "extra_body": OFF}
    if stream:
        arguments, names, reason = "", [], None
        for chunk in client.chat.completions.create(**settings, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                names += [call.function.name] if call.function.name else []
                arguments += call.function.arguments or ""
            reason = chunk.choices[0].finish_reason or reason
    else:
        (answer,) = client.chat.completions.create(**settings).choices
        (call,) = answer.message.tool_calls
        arguments, names, reason = call.function.arguments, [call.function.name], answer.finish_reason
    assert names == ["look"]
    assert set(json.loads(arguments)) == {"path", "deep"}
    assert isinstance(json.loads(arguments)["deep"], bool)
    assert reason == "tool_calls"


def test_a_conversation_with_tool_results(client: openai.OpenAI) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "look", "arguments": '{"path": "a", "deep": true}'},
    }
    messages = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {"role": "assistant", "content": None, "reasoning_content": "Look first.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a list"},
    ]
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=[LOOK],
            tool_choice=choice,
            max_tokens=8,
            extra_body={"chat_template_kwargs": {"reasoning_effort": "low", "preserve_thinking": True}},
        )
        assert answer.usage.completion_tokens <= 8


def test_effort_is_a_template_variable(client: openai.OpenAI) -> None:
    def tokens(**settings: Any) -> int:
        answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=1, **settings)
        return answer.usage.prompt_tokens

    assert tokens() == tokens(reasoning_effort="high") > tokens(reasoning_effort="low")
    assert tokens(reasoning_effort="low") > tokens(reasoning_effort="medium")
    assert tokens(reasoning_effort="none") == tokens(extra_body=OFF)


@pytest.mark.parametrize("stream", [False, True])
def test_responses(client: openai.OpenAI, plain: openai.OpenAI, stream: bool) -> None:
    settings: dict[str, Any] = {"model": MODEL, "input": HI, "max_output_tokens": 20, "temperature": 0}
    expected = plain.responses.create(**settings)
    if stream:
        events = list(client.responses.create(**settings, stream=True))
        kinds = [event.type for event in events]
        answer = events[-1].response
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.incomplete"
        text = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert text == answer.output[0].content[0].text
        assert [event.sequence_number for event in events] == list(range(len(events)))
    else:
        answer = client.responses.create(**settings)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [item.type for item in answer.output] == [item.type for item in expected.output] == ["reasoning"]
    assert answer.output[0].content[0].text == expected.output[0].content[0].text
    assert answer.usage.output_tokens_details.reasoning_tokens == answer.usage.output_tokens == 20


def test_responses_with_tools_and_text(client: openai.OpenAI) -> None:
    tool = {"type": "function", **LOOK["function"], "strict": True}
    settings: dict[str, Any] = {"model": MODEL, "max_output_tokens": 150, "temperature": 0, "extra_body": OFF}
    forced: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(**settings, input="hi", **forced) as events:
        for _ in events:
            pass
        streamed = events.get_final_response()
    answer = client.responses.create(**settings, input="hi", **forced)
    assert streamed.output[-1].arguments == answer.output[-1].arguments
    call = answer.output[-1]
    assert (call.type, call.name) == ("function_call", "look")
    assert set(json.loads(call.arguments)) == {"path", "deep"}
    conversation = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "a list"},
    ]
    form = {"format": {"type": "json_schema", "name": "place", "schema": CITY}}
    answer = client.responses.create(**settings, input=conversation, instructions="Be brief.", text=form)
    assert set(json.loads(answer.output_text)) == {"city", "size"}


@pytest.fixture(scope="module")
def claude(live: Live) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key="none", timeout=120, max_retries=0)


@pytest.mark.parametrize("thinking", [False, True])
def test_messages(claude: anthropic.Anthropic, client: openai.OpenAI, thinking: bool) -> None:
    settings: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 20, "system": "Be brief."}
    settings["extra_body"] = {"temperature": 0}
    settings["thinking"] = {"type": "enabled", "budget_tokens": 1024} if thinking else {"type": "disabled"}
    answer = claude.messages.create(**settings)
    with claude.messages.stream(**settings) as stream:
        streamed = stream.get_final_message()
    assert [b.model_dump() for b in streamed.content] == [b.model_dump() for b in answer.content]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (answer.stop_reason, answer.usage.output_tokens)
    assert answer.content[0].type == ("thinking" if thinking else "text")
    body = {"chat_template_kwargs": {"enable_thinking": thinking}}
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, *HI],
        max_tokens=20,
        temperature=0,
        extra_body=body,
    )
    assert answer.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[chat.choices[0].finish_reason]
    text = answer.content[0].thinking if thinking else answer.content[0].text
    message = chat.choices[0].message
    assert text == (message.reasoning_content if thinking else message.content)
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    counting = {k: v for k, v in settings.items() if k not in ("max_tokens", "extra_body")}
    assert claude.messages.count_tokens(**counting).input_tokens == chat.usage.prompt_tokens


def test_messages_with_tools_and_stops(claude: anthropic.Anthropic) -> None:
    function = LOOK["function"]
    tool = {"name": "look", "description": function["description"], "input_schema": function["parameters"]}
    greedy: dict[str, Any] = {"model": MODEL, "extra_body": {"temperature": 0}}
    settings: dict[str, Any] = {**greedy, "messages": HI, "max_tokens": 150, "tools": [tool]}
    answer = claude.messages.create(**settings, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    with claude.messages.stream(**settings, tool_choice={"type": "any", "disable_parallel_tool_use": True}) as stream:
        streamed = stream.get_final_message()
    for one in (answer, streamed):
        assert one.stop_reason == "tool_use"
        assert (one.content[-1].type, one.content[-1].name) == ("tool_use", "look")
        assert set(one.content[-1].input) == {"path", "deep"}
    result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": [{"type": "text", "text": "a"}]}
    messages = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    follow = claude.messages.create(**greedy, messages=messages, max_tokens=6, tools=[tool])
    assert follow.usage.output_tokens <= 6
    text = claude.messages.create(**greedy, messages=HI, max_tokens=12).content[0].text
    stop = text[4:7]
    stopped = claude.messages.create(**greedy, messages=HI, max_tokens=12, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == text[: text.index(stop)]


def test_refusals_are_the_clients_own_exceptions(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=HI)
    with pytest.raises(openai.BadRequestError, match=r"1024.*2000") as caught:
        client.completions.create(model=MODEL, prompt=[5] * 2000)
    assert caught.value.code == "context_length_exceeded"
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    with pytest.raises(openai.BadRequestError, match="reads text only"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": picture}])
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(model=MODEL, prompt="x", best_of=3)
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}
    with pytest.raises(openai.BadRequestError, match="json_schema cannot be compiled"):
        client.chat.completions.create(model=MODEL, messages=HI, response_format=form)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude-9", messages=HI, max_tokens=5)
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model=MODEL, messages=HI, max_tokens=5, extra_body={"temperature": -1})


def test_a_client_that_leaves_is_noticed(live: Live) -> None:
    """C-API-12: after the client closed the connection the engine kept decoding to the limit."""
    body = {"prompt": "def main", "max_tokens": 900, "ignore_eos": True, "stream": True}
    before = live.metric("stepfloor:requests_cancelled_total")
    for stream in (True, False):
        with httpx2.Client(timeout=60) as http:
            if stream:
                with http.stream("POST", f"{live.url}/v1/completions", json=body) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx2.ReadTimeout):
                    http.post(f"{live.url}/v1/completions", json={**body, "stream": False}, timeout=0.5)
        live.until_idle(20)
    assert live.metric("stepfloor:requests_cancelled_total") == before + 2
    assert live.wait_for("cancelled by client")


def test_a_deadline_ends_a_request(client: openai.OpenAI) -> None:
    settings = {"model": MODEL, "prompt": "x", "max_tokens": 900}
    with pytest.raises(openai.InternalServerError, match=r"deadline of 0\.2 s") as caught:
        client.completions.create(**settings, extra_body={"deadline_s": 0.2, "ignore_eos": True})
    assert caught.value.status_code == 504
