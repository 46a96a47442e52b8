"""litellm against a running server, as an OpenAI-compatible provider. Needs the `clients` dependency group."""

from pathlib import Path
from typing import Any

import pytest

from tests.server.live import serving
from tests.server.test_clients import HI, LOOK, MODEL, OFF


@pytest.mark.slow
def test_litellm(tmp_path: Path) -> None:
    litellm = pytest.importorskip("litellm")
    with serving(tmp_path / "log", "--max-num-seqs", "2", "--max-model-len", "1024") as live:
        settings: dict[str, Any] = {
            "model": f"openai/{MODEL}",
            "api_base": f"{live.url}/v1",
            "api_key": "none",
            "messages": HI,
            "max_tokens": 16,
            "temperature": 0,
        }
        whole = litellm.completion(**settings)
        chunks = list(litellm.completion(**settings, stream=True, stream_options={"include_usage": True}))
        built = litellm.stream_chunk_builder(chunks, messages=HI)
        for field in ("content", "reasoning_content"):
            assert getattr(whole.choices[0].message, field, None) == getattr(built.choices[0].message, field, None)
        assert whole.choices[0].message.reasoning_content
        assert built.usage.completion_tokens == whole.usage.completion_tokens == 16
        text = litellm.text_completion(
            model=f"text-completion-openai/{MODEL}",
            api_base=f"{live.url}/v1",
            api_key="none",
            prompt="def main",
            max_tokens=8,
            temperature=0,
        )
        assert text.choices[0].text
        called = litellm.completion(
            **{**settings, "max_tokens": 150},
            tools=[LOOK],
            tool_choice={"type": "function", "function": {"name": "look"}},
            extra_body=OFF,
        )
        assert called.choices[0].message.tool_calls[0].function.name == "look"
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**{**settings, "messages": [{"role": "user", "content": "a b c " * 600}]})
