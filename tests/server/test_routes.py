"""What the server answers, and what it refuses, in the words its clients expect."""

import json
from typing import Any

import pytest

from stepfloor.cli import app as cli
from stepfloor.errors import UserError
from stepfloor.server.app import AppOptions
from stepfloor.server.flags import model_among
from stepfloor.server.metrics import ALARM_DRAFTS, AcceptanceAlarm
from stepfloor.server.options import json_strings, profile_directory, speculation
from tests.server.scripted import EOS, Scripted, scripted
from tests.server.test_protocol_cases import CHAT, EDIT, NO_THINKING, PLAIN


@pytest.fixture(scope="module")
def server() -> Scripted:
    return scripted(["a", "b", EOS])


def test_plain_routes(server: Scripted) -> None:
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("small", 4096)
    assert server.get("/v1/models/small").json() == model
    assert server.get("/v1/models/other").status_code == 404
    assert server.get("/health").status_code == server.get("/ping").status_code == 200
    assert server.get("/version").json()["version"]
    assert server.get("/server_info").json() == {"version": server.get("/version").json()["version"]}
    assert server.get("/load").json() == {"server_load": 0}
    tokens = server.post("/tokenize", prompt="def main").json()
    assert tokens["count"] == len(tokens["tokens"])
    assert server.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": "def main"}
    chat = server.post("/tokenize", messages=CHAT["messages"], return_token_strs=True).json()
    assert "".join(chat["token_strs"]).endswith("<think>\n")
    assert server.get("/nowhere").json()["error"]["type"] == "not_found_error"


def test_metrics_have_vllms_names(server: Scripted) -> None:
    server.post("/v1/completions", **PLAIN)
    page = server.get("/metrics").text
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc", "vllm:cache_config_info", "vllm:engine_sleep_state", "vllm:prompt_tokens_total",
        "vllm:prompt_tokens_by_source_total", "vllm:prompt_tokens_cached_total", "vllm:generation_tokens_total",
        "vllm:request_success_total", "vllm:num_preemptions_total", "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total",
        "vllm:external_prefix_cache_hits_total", "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
        "vllm:request_time_per_output_token_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_queue_time_seconds_bucket", "vllm:request_inference_time_seconds_bucket",
        "vllm:request_prefill_time_seconds_bucket", "vllm:request_decode_time_seconds_bucket",
        "vllm:iteration_tokens_total_bucket", "vllm:request_prompt_tokens_bucket",
        "vllm:request_generation_tokens_bucket", "vllm:request_params_max_tokens_bucket",
        "vllm:request_params_n_bucket", "vllm:request_prefill_kv_computed_tokens_bucket",
        "process_start_time_seconds",
    ):  # fmt: skip
        assert f"\n{name}{{" in page or f"\n{name} " in page, name
    assert "_created" not in page


def stats(drafted: list[int], accepted: list[int]) -> dict[str, Any]:
    counts = {"steps": 2, "running": 1, "waiting": 0, "kv_cache_usage": 0.5, "decode_steps": 2, "delivered": 4}
    return {**counts, "drafted": drafted, "accepted": accepted}


def test_acceptance_is_exported_by_position() -> None:
    """C-SPEC-03: what a step delivered, over steps; drafted and accepted for each position."""
    server = scripted([EOS])
    server.service.metrics.take_stats(stats([2, 2, 2], [2, 1, 0]))
    page = server.get("/metrics").text
    labels = 'engine="0",model_name="small"'
    for position, (drafted, accepted) in enumerate(((2, 2), (2, 1), (2, 0))):
        where = f'{{{labels},position="{position}"}}'
        assert f"vllm:spec_decode_num_accepted_tokens_per_pos_total{where} {accepted}.0" in page
        assert f"stepfloor:drafted_tokens_per_pos_total{where} {drafted}.0" in page
    assert f"stepfloor:decode_delivered_tokens_total{{{labels}}} 4.0" in page
    assert f"vllm:spec_decode_num_drafts_total{{{labels}}} 2.0" in page


def test_the_alarm_goes_on_when_acceptance_dies() -> None:
    alarm = AcceptanceAlarm()
    assert not alarm.look(ALARM_DRAFTS, ALARM_DRAFTS // 2)
    assert not alarm.look(ALARM_DRAFTS + 10, ALARM_DRAFTS // 2)  # too few to tell
    assert alarm.look(2 * ALARM_DRAFTS, ALARM_DRAFTS // 2 + 3)
    assert alarm.on
    assert not alarm.look(3 * ALARM_DRAFTS, ALARM_DRAFTS // 2 + 3)  # told once
    alarm.look(4 * ALARM_DRAFTS, ALARM_DRAFTS)
    assert not alarm.on


def test_a_key_opens_every_route_but_those_of_monitors() -> None:
    server = scripted(["a", EOS], options=AppOptions(api_keys=("one", "two")))
    assert server.get("/health").status_code == server.get("/metrics").status_code == 200
    for headers in ({}, {"authorization": "Bearer three"}, {"x-api-key": "on"}):
        refused = server.get("/v1/models", **headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
    for headers in ({"authorization": "Bearer one"}, {"authorization": "bearer two"}, {"x-api-key": "two"}):
        assert server.get("/v1/models", **headers).status_code == 200


def test_trouble_is_503(server: Scripted) -> None:
    for field, value in (("gone", "the engine's process has ended"), ("silent_s", 61.0)):
        broken = scripted(["a", EOS])
        setattr(broken.engine, field, value)
        answer = broken.get("/health")
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
    draining = scripted(["a", EOS])
    draining.service.draining = True
    assert draining.get("/health").status_code == 503
    assert draining.post("/v1/completions", **PLAIN).status_code == 503
    assert draining.get("/metrics").status_code == 200


def test_a_full_queue_is_503_with_retry_after() -> None:
    full = scripted(["a", EOS], max_queued=0)
    answer = full.post("/v1/completions", **PLAIN, n=3)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "queue_full"
    anthropic = full.post("/v1/messages", messages=CHAT["messages"], max_tokens=4)
    assert anthropic.status_code in (200, 503)


def test_every_answer_has_a_request_id(server: Scripted) -> None:
    assert server.get("/version", **{"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    assert len(server.get("/nowhere").headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {"prompt": ""}, "empty"),
        ("/v1/completions", {"prompt": []}, "empty"),
        ("/v1/completions", {"prompt": [[]]}, "empty"),
        ("/v1/completions", {"prompt": [99999]}, "token ids"),
        ("/v1/completions", {**PLAIN, "temperature": -1}, "temperature"),
        ("/v1/completions", {**PLAIN, "top_p": 0}, "top_p"),
        ("/v1/completions", {**PLAIN, "logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/completions", {**PLAIN, "logit_bias": {"999999": 1}}, "token ids"),
        ("/v1/completions", {**PLAIN, "logprobs": 21}, "max-logprobs"),
        ("/v1/completions", {**PLAIN, "echo": True, "logprobs": 1}, "echo"),
        ("/v1/completions", {**PLAIN, "best_of": 4}, "best_of"),
        ("/v1/completions", {**PLAIN, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {**PLAIN, "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ("/v1/completions", {**PLAIN, "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {**PLAIN, "guided_regex": "a", "guided_choice": ["a"]}, "more than one"),
        ("/v1/completions", {**PLAIN, "guided_choice": []}, "choice"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "oracle", "content": "x"}]}, "role"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 3}, "logprobs"),
        ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, "no tools"),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"reasoning_effort": "huge"}}, "reasoning_effort"),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, "schema"),
        ("/v1/responses", {"input": "x", "previous_response_id": "r"}, "previous_response_id"),
        ("/v1/responses", {"input": [{"type": "web_search_call"}]}, "web_search_call"),
        ("/v1/responses", {"input": []}, "no messages"),
        ("/tokenize", {}, "prompt or messages"),
        ("/detokenize", {"tokens": [10**9]}, "token ids"),
        ("/start_profile", {}, "profiler-config"),
    ],
)
def test_refusals_name_what_is_wrong(server: Scripted, path: str, body: dict[str, Any], says: str) -> None:
    answer = server.post(path, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url"])
def test_only_text_is_read(server: Scripted, kind: str) -> None:
    content = [{"type": "text", "text": "what?"}, {"type": kind, kind: {"url": "x"}}]
    for path, body in (
        ("/v1/chat/completions", {}),
        ("/v1/messages", {"max_tokens": 5}),
        ("/v1/responses", {}),
    ):
        key = "input" if path == "/v1/responses" else "messages"
        answer = server.post(path, **{key: [{"role": "user", "content": content}], **body})
        assert answer.status_code == 400
        assert kind in answer.text


def raw(server: Scripted, body: bytes) -> Any:
    import asyncio

    return asyncio.run(
        server._request("POST", "/v1/completions", content=body, headers={"content-type": "application/json"})
    )


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"prompt": "\\ud800"}', b'{"prompt": "x", "temperature": NaN}', b"[" * 100_000, b"\xff"],
)
def test_broken_bodies_are_400(server: Scripted, body: bytes) -> None:
    assert raw(server, body).status_code == 400


def test_whole_surrogate_pairs_are_text(server: Scripted) -> None:
    assert raw(server, b'{"prompt": "\\ud83d\\ude00"}').status_code == 200


def test_several_prompts_and_answers_keep_their_numbers() -> None:
    server = scripted(["a", "b", EOS])
    answer = server.post("/v1/completions", prompt=["x", "y"], n=2, echo=True, temperature=0).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "xab"), (1, "xab"), (2, "yab"), (3, "yab")]
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens"] == 2
    seeds = [request.sampling.seed for request in server.engine.submitted]
    server.post("/v1/completions", prompt="x", n=3, seed=5)
    assert [r.sampling.seed for r in server.engine.submitted[len(seeds) :]] == [5, 6, 7]


def test_continuous_usage(server: Scripted) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events("/v1/completions", **PLAIN, stream_options=options)
    assert all("usage" in event for event in events[:-1])
    assert events[-2]["choices"] == []


def test_the_checkpoints_sampling_is_the_default() -> None:
    server = scripted([EOS], config={"sampling": {"temperature": 0.6, "top_k": 20}, "deadline_s": 3.0})
    server.post("/v1/completions", prompt="x")
    server.post("/v1/completions", prompt="x", temperature=0, top_k=0)
    first, second = server.engine.submitted
    assert (first.sampling.temperature, first.sampling.top_k) == (0.6, 20)
    assert (second.sampling.temperature, second.sampling.top_k) == (0, 0)


def grammar_of(body: dict[str, Any]) -> Any:
    server = scripted(["{", "}", EOS])
    assert server.post("/v1/chat/completions", **body).status_code == 200
    return server.engine.submitted[0].grammar


def test_constraints_reach_the_engine() -> None:
    json_object = {"response_format": {"type": "json_object"}}
    assert json.loads(grammar_of({**NO_THINKING, **json_object}).text) == {"type": "object"}
    assert grammar_of({**NO_THINKING, **json_object}).after is None
    assert grammar_of({**CHAT, **json_object}).after == "</think>"
    assert grammar_of({**CHAT, "response_format": {"type": "text"}}) is None
    assert grammar_of({**CHAT, "tools": [EDIT]}) is None
    forced = grammar_of({**CHAT, "tools": [EDIT], "tool_choice": "required"})
    assert (forced.kind, forced.after) == ("structural_tag", "</think>")
    assert "star" in forced.text
    named = {"type": "function", "function": {"name": "edit"}}
    assert "star" not in grammar_of({**CHAT, "tools": [EDIT], "tool_choice": named}).text


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    server = scripted(["<tool_call>", EOS])
    answer = server.post("/v1/chat/completions", **NO_THINKING, tools=[EDIT], tool_choice="none").json()
    assert answer["choices"][0]["message"]["content"] == "<tool_call>"
    shown = server.post("/v1/chat/completions", **NO_THINKING, tools=[EDIT]).json()
    assert shown["usage"]["prompt_tokens"] > answer["usage"]["prompt_tokens"]


def test_flags_of_vllm_that_ask_for_what_is_done() -> None:
    chunked = ["--enable-chunked-prefill", "--tensor-parallel-size", "1", "--tool-call-parser=qwen3_coder"]
    assert model_among([*chunked, "a/model"], []) == "a/model"
    rest = ["--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--trust_remote_code", "--dtype=auto"]
    assert model_among(["dir", *rest, "--no-enable-prefix-caching"], []) == "dir"
    assert model_among(chunked, []) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--enable-prefix-caching"], "--enable-prefix-caching is not supported: there is no prefix cache yet"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size 2 is not supported"),
        (["--quantization", "fp8"], "--quantization fp8 is not supported"),
        (["--max-num-seq", "3"], "there is no flag --max-num-seq; did you mean --max-num-seqs"),
        (["--frobnicate"], "there is no flag --frobnicate"),
        (["one", "other"], "'other' is one word too many"),
    ],
)
def test_flags_that_ask_for_something_else_are_named(arguments: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        model_among(arguments, ["--max-num-seqs", "--port"])


def test_drafts_have_two_flags_that_may_not_differ() -> None:
    config = '{"method": "mtp", "num_speculative_tokens": 2}'
    none = ()
    assert speculation(None, config, True) == speculation(2, config, True) == (2, none)
    assert (speculation(4, None, True), speculation(None, None, True)) == ((4, none), (3, none))
    assert speculation(None, None, False) == (0, none)
    ranges = '{"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 16, 1]]}'
    assert speculation(None, ranges, True) == (3, ((1, 4, 3), (5, 16, 1)))
    for given, text, says in (
        (3, config, "--spec-tokens is 3 and --speculative-config says 2"),
        (None, '{"method": "eagle"}', "eagle"),
        (None, '{"model": "x", "quantization": "fp8"}', "quantization"),
        (None, "[]", "JSON object"),
        (None, '{"num_speculative_tokens": true}', "integer"),
        (None, '{"num_speculative_tokens_per_batch_size": [[1, 4]]}', "lowest, highest, drafts"),
    ):
        with pytest.raises(UserError, match=says):
            speculation(given, text, True)


def test_other_flags_that_carry_json() -> None:
    assert json_strings("--allowed-origins", '["a"]') == ("a",)
    assert str(profile_directory('{"torch_profiler_dir": "d"}')) == "d"
    for text in ('{"profiler": "cuda"}', '{"torch_profiler_dir": 3}'):
        with pytest.raises(UserError, match="profiler"):
            profile_directory(text)
    with pytest.raises(UserError, match="--allowed-origins"):
        json_strings("--allowed-origins", "*")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ssl-keyfile", "k"], "--ssl-certfile"),
        (["--acceptance", "loose"], "--acceptance"),
        (["a", "--model", "b"], "given twice"),
        (["--spec-tokens", "9"], "--spec-tokens must be 0 to 7"),
        (["--max-model-len", "999999"], "--max-model-len"),
        (["--uvicorn-log-level", "loud"], "--uvicorn-log-level"),
        (["--enable-chunked-prefill", "--enable-lora"], "--enable-lora is not supported"),
        (["--override-generation-config", '{"max_tokens": 3}'], "max_tokens"),
    ],
)
def test_contradictions_are_refused_before_anything_is_loaded(flags: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        cli(["serve", *flags], standalone_mode=False)
