"""A checkpoint on the Hugging Face hub by its headers alone: a few MB of JSON and byte ranges in place of 126 GB.

Source: the safetensors format puts names, dtypes and shapes at the start of each file; the hub serves byte ranges.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stepfloor.errors import UserError
from stepfloor.weights.checkpoint import DOCUMENTS, INDEX, Checkpoint, take_census
from stepfloor.weights.headers import Header, header_length, parse_header, start_fault
from stepfloor.weights.sources import Hub

_FIRST_BYTES = 1 << 19  # holds the header of most files; a longer one takes a second request
_REQUESTS = 16  # at once
_TIMEOUT_S = 30


def open_remote(
    name: str, hub: Hub, *, revision: str | None = None, hf_overrides: Mapping[str, Any] | None = None
) -> Checkpoint:
    """The census of a hub id (owner/name); no tensor is fetched, so values of scales and hash constants go unchecked.

    Raises UserError where the hub has no such model, forbids it or cannot be reached, and for faults of the headers.
    """
    fetch = _Hub(name, hub, revision or "main")
    documents: dict[str, dict[str, Any]] = {}
    for document in DOCUMENTS:
        content = fetch.get(document)
        if content is None:
            if document == "config.json":
                raise UserError(
                    f"the hub has no model {name} at {revision or 'main'} with a config.json, or it is private; check "
                    "the id and HF_TOKEN"
                )
            continue
        documents[document] = _parsed(name, document, content)
    listed = documents.get(INDEX, {}).get("weight_map")
    files = sorted(set(listed.values())) if isinstance(listed, dict) else ["model.safetensors"]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        headers = list(pool.map(fetch.header, files))
    return take_census(
        Path(name), documents, [h for h in headers if h is not None], hf_overrides=hf_overrides, has_bytes=False
    )


class _Hub:
    """Requests for the files of one model at one revision."""

    def __init__(self, name: str, hub: Hub, revision: str) -> None:
        from huggingface_hub.utils import build_hf_headers

        self.name, self.hub, self.revision = name, hub, revision
        self.headers = build_hf_headers(token=hub.token)

    def get(self, file: str, first: int = 0, count: int | None = None) -> bytes | None:
        """Bytes of a file, `count` of them from `first` on or all; None if there is no such file."""
        reply = self._reply(file, first, count)
        return None if reply is None else reply[0]

    def header(self, file: str) -> Header | None:
        """The header of a file; None if there is no such file, which the census reports by the index."""
        reply = self._reply(file, 0, _FIRST_BYTES)
        if reply is None:
            return None
        start, size = reply
        wanted = 8 + header_length(start)
        if len(start) < wanted and start_fault(file, start, size) is None:
            start += self.get(file, len(start), wanted - len(start)) or b""
        return parse_header(Path(file), start, size)

    def _reply(self, file: str, first: int, count: int | None) -> tuple[bytes, int] | None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import get_session

        url = hf_hub_url(self.name, file, revision=self.revision, endpoint=self.hub.endpoint)
        headers = dict(self.headers)
        if count is not None:
            headers["Range"] = f"bytes={first}-{first + count - 1}"
        try:
            reply = get_session().get(url, headers=headers, timeout=_TIMEOUT_S)
        # the client underneath is requests or httpx, whose errors share no narrower parent
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"{self.name}: {file} could not be fetched ({reason}); check the network, or pass a directory or a "
                "layout known to the package"
            ) from None
        if reply.status_code == 404:
            return None
        if reply.status_code in (401, 403):
            raise UserError(f"{self.name} is gated or private; accept its terms on the hub and set HF_TOKEN")
        if reply.status_code not in (200, 206):
            raise UserError(f"{self.name}: the hub answered {reply.status_code} for {file}; try again later")
        content = reply.content
        size = reply.headers.get("Content-Range", "").rpartition("/")[2]
        return content, int(size) if size.isdecimal() else len(content)


def _parsed(name: str, document: str, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise UserError(f"{name}: {document} is not valid JSON ({error}); the upload is broken") from None
    if not isinstance(value, dict):
        raise UserError(f"{name}: {document}: wanted a JSON object; found {type(value).__name__}")
    return value
