"""A streamed answer as it grows: when generated tokens came, of whatever kind, and how many the server says they are.

A chunk is not a token: a step with drafts delivers several at once, and a token may wait for the rest of a character.
So tokens are counted by the server's usage, or by ids where it sends them, and never by chunks.

Source: OpenAI's streaming format; vLLM 0.33 for continuous_usage_stats, token_ids and reasoning; llama.cpp's server for
timings.
"""

import json
from collections.abc import Mapping
from typing import Any

TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


class Answer:
    """Takes the body of a text/event-stream piece by piece, each with the time of its arrival.

    chunk_s       arrivals of chunks that brought something generated
    chunk_tokens  tokens that had come with each of them; shorter than chunk_s if the server does not count them
    """

    def __init__(self) -> None:
        self.chunk_s: list[float] = []
        self.chunk_tokens: list[int] = []
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.usage: Mapping[str, Any] = {}
        self.timings: Mapping[str, Any] = {}
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.finished = False
        self._rest = b""
        self._counted = 0

    def feed(self, at: float, data: bytes) -> None:
        """Take a piece that arrived at this time."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line[:5] == b"data:":
                self._event(at, line[5:].strip())

    @property
    def text(self) -> str:
        """Everything that was generated, in the order it came."""
        return "".join(self.texts)

    @property
    def prompt_tokens(self) -> int | None:
        """As the server counts."""
        return self.usage.get("prompt_tokens")

    @property
    def output_tokens(self) -> int | None:
        """As the server counts, or as many ids as it sent."""
        count = self.usage.get("completion_tokens")
        if count is None:
            count = self.timings.get("predicted_n")
        return len(self.token_ids) or None if count is None else count

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the server took from a cache, where it says so."""
        details = self.usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return self.timings.get("cache_n") if cached is None else cached

    def _event(self, at: float, data: bytes) -> None:
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.error = f"an event is not JSON: {data[:80]!r}"
            return
        if error := event.get("error"):
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        self.usage = event.get("usage") or self.usage
        self.timings = event.get("timings") or self.timings
        choices = event.get("choices")
        if not choices:
            return
        choice = choices[0]
        text = _generated(choice)
        ids = choice.get("token_ids") or ()
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.token_ids += ids
        counted = (event.get("usage") or {}).get("completion_tokens")
        if counted is None:
            counted = (event.get("timings") or {}).get("predicted_n", len(self.token_ids))
        if not text and not ids and counted <= self._counted:
            return
        self.texts.append(text)
        self.chunk_s.append(at)
        if counted > self._counted:
            self._counted = counted
            self.chunk_tokens.append(counted)


def _generated(choice: Mapping[str, Any]) -> str:
    """What a chunk adds, whatever its kind; "" for one that only opens or closes the message."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    text = "".join(delta.get(name) or "" for name in TEXTS)
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        text += (function.get("name") or "") + (function.get("arguments") or "")
    return text
