"""What the shipped chat template makes of messages."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from stepfloor.errors import UserError
from stepfloor.tokenizer.tokenizer import Tokenizer

XHIGH = "Reason as long as the question needs before you answer."
HI = {"role": "user", "content": " hi \n"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"role": "assistant", "content": "I look.", "reasoning_content": "Look first."} | {
    "tool_calls": [
        {"function": {"name": "look", "arguments": '{"at": "a <b>\\nc", "deep": true}'}},
        {"function": {"name": "stop", "arguments": ""}},
    ]
}
RESULTS = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]


def test_thinking_is_on_with_full_effort(tokenizer: Tokenizer) -> None:
    assert tokenizer.apply_chat_template([HI], add_generation_prompt=True) == (
        f"<|im_start|>system\n{XHIGH}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.parametrize("variables", [{"reasoning_effort": "medium"}, {"enable_thinking": False}])
def test_medium_effort_and_thinking_off_add_no_system_turn(tokenizer: Tokenizer, variables: dict[str, Any]) -> None:
    assert tokenizer.apply_chat_template([HI], **variables) == "<|im_start|>user\nhi<|im_end|>\n"


def test_thinking_off_closes_the_think_block_in_the_prompt(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.apply_chat_template([HI], enable_thinking=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_users_system_text_comes_last(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template([{"role": "system", "content": "Be kind."}, HI], tools=[TOOL])
    system = text.split("<|im_end|>")[0]
    assert system.startswith(f"<|im_start|>system\n{XHIGH}\n\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "look"' in system
    assert system.endswith("\n\nBe kind.")


def test_a_system_message_may_only_come_first(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="only be the first"):
        tokenizer.apply_chat_template([HI, {"role": "system", "content": "late"}])


def test_tool_calls_and_results_read_as_the_parser_expects(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template([HI, CALL, *RESULTS], reasoning_effort="medium")
    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nLook first.\n</think>\n\nI look.\n\n"
        "<tool_call>\n<function=look>\n<parameter=at>\na <b>\nc\n</parameter>\n"
        "<parameter=deep>\ntrue\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=stop>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    )


def test_tool_call_arguments_that_are_no_object_are_refused(tokenizer: Tokenizer) -> None:
    for arguments in ("[1]", "{", "3"):
        call = {"function": {"name": "look", "arguments": arguments}}
        with pytest.raises(UserError, match="look"):
            tokenizer.apply_chat_template([HI, {"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize("keep", [True, False])
def test_old_reasoning_is_kept_unless_asked_otherwise(tokenizer: Tokenizer, keep: bool) -> None:
    messages = [HI, {"role": "assistant", "content": "<think>\nold\n</think>\n\nyes"}, HI, CALL, *RESULTS]
    text = tokenizer.apply_chat_template(messages, preserve_thinking=keep)
    assert ("<think>\nold\n</think>\n\nyes" in text) is keep
    # a tool result is not a new question, so the reasoning of the running answer stays
    assert "<think>\nLook first.\n</think>" in text


def test_pictures_leave_one_placeholder_each(tokenizer: Tokenizer) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "what?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], enable_thinking=False, add_vision_id=True
    )
    assert text == "<|im_start|>user\nPicture 1: <|vision_start|><|image_pad|><|vision_end|>what?<|im_end|>\n"


@pytest.mark.parametrize(
    ("messages", "variables", "reason"),
    [
        ([], {}, "no messages"),
        ([HI], {"reasoning_effort": "extreme"}, "reasoning_effort"),
        ([{"role": "oracle", "content": "x"}], {}, "unknown role"),
        ([{"role": "user", "content": [{"type": "smell"}]}], {}, "content part"),
    ],
)
def test_refusals_say_why(tokenizer: Tokenizer, messages: list[Any], variables: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        tokenizer.apply_chat_template(messages, **variables)


def test_a_template_cannot_reach_the_interpreter(tokenizer_directory: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "hostile.jinja"
    hostile.write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}", encoding="utf-8")
    with pytest.raises(UserError, match="refused"):
        Tokenizer.load(tokenizer_directory, hostile).apply_chat_template([HI])


@pytest.mark.parametrize(
    "variables",
    [{}, {"enable_thinking": False}, {"reasoning_effort": "low", "tools": [TOOL]}, {"preserve_thinking": False}],
)
def test_transformers_renders_the_same(
    tokenizer: Tokenizer, tokenizer_directory: Path, variables: dict[str, Any]
) -> None:
    plain_calls = [{"function": {"name": "look", "arguments": {"at": "é <b>", "deep": [1, "ü"]}}}]
    messages = [HI, {"role": "assistant", "content": "", "tool_calls": plain_calls}, *RESULTS, HI]
    reference = transformers.AutoTokenizer.from_pretrained(tokenizer_directory)
    want = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables) == want


def test_a_checkpoint_without_a_template_says_so(tokenizer_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_directory / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="--chat-template"):
        Tokenizer.load(tmp_path).apply_chat_template([HI])
