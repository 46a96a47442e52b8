"""Messages between the HTTP process and the engine's process: JSON with a run of token ids behind it.

A frame is two little-endian uint32, the bytes of the JSON and of the ids; the JSON (UTF-8); the ids (int32). Ids stand
outside the JSON because a prompt of 150,000 of them would otherwise be parsed as text between two steps.
"""

import json
import logging
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stepfloor.config import EngineConfig
from stepfloor.request import Grammar, Piece, Request, SamplingParams, TokenLogprob

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What the engine's process loads, and all it is told at its start."""

    directory: Path
    config: EngineConfig
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    log_level: int = logging.INFO


_HEADER = struct.Struct("<II")


def encode(message: Message, ids: Sequence[int] = ()) -> bytes:
    """One frame."""
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
    packed = array("i", ids).tobytes() if ids else b""
    return _HEADER.pack(len(text), len(packed)) + text + packed


class Frames:
    """Frames out of a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[Message, Sequence[int]]]:
        """Take more bytes; returns the messages that are complete now, each with its ids."""
        self._buffer += data
        done: list[tuple[Message, Sequence[int]]] = []
        at = 0
        while len(self._buffer) - at >= _HEADER.size:
            text_bytes, ids_bytes = _HEADER.unpack_from(self._buffer, at)
            start = at + _HEADER.size
            end = start + text_bytes + ids_bytes
            if len(self._buffer) < end:
                break
            message = json.loads(bytes(self._buffer[start : start + text_bytes]))
            ids = array("i")
            ids.frombytes(bytes(self._buffer[start + text_bytes : end]))
            done.append((message, ids))
            at = end
        del self._buffer[:at]
        return done


def encode_submit(requests: Sequence[Request], deadline_s: float | None) -> bytes:
    """A group of requests, all of which are accepted or none; deadline_s from now until they must be over."""
    described = []
    ids: list[int] = []
    for request in requests:
        fields = asdict(request)
        del fields["token_ids"]
        described.append({**fields, "prompt_tokens": len(request.token_ids)})
        ids.extend(request.token_ids)
    return encode({"type": "submit", "requests": described, "deadline_s": deadline_s}, ids)


def decode_submit(message: Message, ids: Sequence[int]) -> list[Request]:
    """The requests of a submit message."""
    requests: list[Request] = []
    at = 0
    for described in message["requests"]:
        fields = dict(described)
        end = at + fields.pop("prompt_tokens")
        sampling = fields.pop("sampling")
        sampling["logit_bias"] = tuple((token, value) for token, value in sampling["logit_bias"])
        sampling["forbidden_ids"] = tuple(sampling["forbidden_ids"])
        grammar = fields.pop("grammar")
        fields["stop_token_ids"] = tuple(fields["stop_token_ids"])
        fields["stop"] = tuple(fields["stop"])
        requests.append(
            Request(
                token_ids=tuple(ids[at:end]),
                sampling=SamplingParams(**sampling),
                grammar=None if grammar is None else Grammar(**grammar),
                **fields,
            )
        )
        at = end
    return requests


def pack_piece(piece: Piece) -> list[Any]:
    """A Piece as a JSON array; what is usually absent stands at the end and is left out."""
    packed: list[Any] = [piece.request_id, piece.token_ids, piece.deltas]
    if piece.finish_reason is not None or piece.logprobs:
        packed += [piece.finish_reason, piece.stop_reason, piece.error]
    if piece.logprobs:
        packed.append([[entry.logprob, entry.top] for entry in piece.logprobs])
    return packed


def unpack_piece(packed: Sequence[Any]) -> Piece:
    """The Piece of such an array."""
    request_id, token_ids, deltas, *rest = packed
    finish_reason, stop_reason, error = rest[:3] or (None, None, None)
    logprobs = tuple(
        TokenLogprob(logprob, tuple((token, value) for token, value in top))
        for logprob, top in (rest[3] if len(rest) > 3 else ())
    )
    return Piece(request_id, tuple(token_ids), tuple(deltas), finish_reason, stop_reason, error, logprobs)
