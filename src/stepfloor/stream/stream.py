"""Token ids of every running request to the Pieces that go out."""

from collections.abc import Callable, Collection, Sequence

from stepfloor.errors import UserError
from stepfloor.request import FinishReason, Piece, Request
from stepfloor.stream.text import TextStream


class Stream:
    """Owns the text that was generated and not sent yet, by request."""

    def __init__(self, token_bytes: Callable[[int], bytes] | None = None, hidden_ids: Collection[int] = ()) -> None:
        """Serve no request yet.

        token_bytes  bytes of one token id; None where there is no tokenizer: Pieces then carry ids and no text
        hidden_ids   special ids whose text is not shown; they are delivered as ids all the same
        """
        self._token_bytes = token_bytes
        self._hidden_ids = frozenset(hidden_ids)
        self._texts: dict[str, TextStream | None] = {}

    def open(self, request: Request) -> None:
        """Begin a request.

        Raises UserError for a request id in use, an empty stop string, and any where no tokenizer can find it.
        """
        if request.request_id in self._texts:
            raise UserError(f"request ids must differ; {request.request_id!r} is running; choose another")
        if "" in request.stop:
            raise UserError(f"a stop string must not be empty; got {list(request.stop)}")
        if self._token_bytes is None:
            if request.stop:
                raise UserError(
                    f"stop strings need a tokenizer and this checkpoint has none; got {list(request.stop)}; "
                    "pass stop_token_ids"
                )
            self._texts[request.request_id] = None
        else:
            self._texts[request.request_id] = TextStream(
                self._token_bytes,
                self._hidden_ids if request.skip_special_tokens else (),
                request.stop,
                request.min_tokens,
                request.include_stop,
            )

    def push(
        self,
        request_id: str,
        ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_id: int | None = None,
    ) -> Piece:
        """Deliver the tokens of one step.

        finish_reason  why no token follows, if none does; stop_id  the id that ended it, if one did
        Returns the Piece to send: its ids end with the token that completed a stop string, if one did, and its
        finish_reason is then "stop" whatever was passed. A finished request is closed. Raises ValueError for a
        request that is not open.
        """
        if request_id not in self._texts:
            raise ValueError(f"request {request_id!r} is not open")
        text = self._texts[request_id]
        if text is None:
            piece = Piece(request_id, tuple(ids), (), finish_reason, stop_id)
        else:
            piece = _text_piece(text, request_id, ids, finish_reason, stop_id)
        if piece.finish_reason is not None:
            self.close(request_id)
        return piece

    def close(self, request_id: str) -> None:
        """Forget a request and its unsent text; one that is not open is left alone."""
        self._texts.pop(request_id, None)


def _text_piece(
    text: TextStream, request_id: str, ids: Sequence[int], finish_reason: FinishReason | None, stop_id: int | None
) -> Piece:
    deltas: list[str] = []
    for token_id in ids:
        deltas.append(text.push(token_id))
        if text.stopped is not None:
            return Piece(request_id, tuple(ids[: len(deltas)]), tuple(deltas), "stop", text.stopped)
    if finish_reason is not None and (rest := text.flush()):
        deltas.append(rest)
        if text.stopped is not None:
            return Piece(request_id, tuple(ids), tuple(deltas), "stop", text.stopped)
    return Piece(request_id, tuple(ids), tuple(deltas), finish_reason, stop_id)
