"""Token bytes to text that can be sent at once: whole characters only, and nothing that may become a stop string.

Joined deltas equal `bytes.decode("utf-8", "replace")` of all bytes, cut before the first stop string. A stop string
is found where it ends first, whatever the split of tokens into steps; of two that end together the longer counts.
Source: RFC 3629 for what is an incomplete character; Python's incremental decoder for where a broken one ends.
"""

import codecs
from collections.abc import Callable, Collection, Sequence


class TextStream:
    """Unsent text of one request."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        hidden_ids: Collection[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """Start with no text.

        token_bytes   bytes of one token id; hidden_ids  special ids that are not shown
        stop          strings that end the text; include_stop  the one that does is part of it
        min_tokens    tokens whose text may hold a stop string. Raises ValueError if one is empty.
        """
        if "" in stop:
            raise ValueError(f"a stop string must not be empty; got {list(stop)}")
        self._token_bytes = token_bytes
        self._hidden_ids = hidden_ids
        self._stop = tuple(stop)
        self._free_tokens = min_tokens
        self._include_stop = include_stop
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        """Take one more token; returns what can be sent now. `stopped` is the stop string that ended the text."""
        text = "" if token_id in self._hidden_ids else self._decode.decode(self._token_bytes(token_id))
        if self._free_tokens > 0:
            self._free_tokens -= 1
            return text
        return self._take(text) if text else ""

    def flush(self) -> str:
        """The rest, when no token will follow: held text, and U+FFFD for a character that was never completed."""
        text = self._take(self._decode.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _take(self, new: str) -> str:
        if self.stopped is not None or not self._stop:
            return "" if self.stopped is not None else new
        text = self._held + new
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.stopped, self._held = text[start:end], ""
            return text[: end if self._include_stop else start]
        kept = len(text) - self._held_length(text)
        self._held = text[kept:]
        return text[:kept]

    def _held_length(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if any(s.startswith(text[-n:]) and len(s) > n for s in self._stop)), 0)
