"""Who answers at a URL: model, server, version, and what it tells of its configuration."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepfloor.errors import UserError
from stepfloor.tools.bench.client import Client
from stepfloor.tools.bench.result import Target
from stepfloor.tools.bench.scrape import Page, fetch_page


@dataclass(frozen=True, slots=True)
class Found:
    """A target, and what a load must know of it; its config is empty unless the whole of it was told.

    info  labels of what its metrics page says of its cache: a part, which does not make runs comparable
    """

    target: Target
    max_model_len: int | None
    page: Page | None
    info: Mapping[str, str]


async def find_target(client: Client, model: str | None, config: Mapping[str, Any] | None = None) -> Found:
    """Ask the server. config is what its owner says of it (argv, environment). Raises UserError if nobody answers."""
    status, data = await client.fetch("GET", "/v1/models")
    if status in (401, 403):
        raise UserError(f"{client.url} wants a key ({status}); pass --api-key")
    listed: list[Mapping[str, Any]] = []
    if status == 200:
        try:
            listed = list(json.loads(data)["data"])
        except (ValueError, KeyError, TypeError):
            listed = []
    names = [str(entry.get("id")) for entry in listed]
    if model is None and not names:
        raise UserError(f"{client.url}/v1/models lists no model (status {status}); pass --model")
    if model is not None and names and model not in names:
        raise UserError(f"{client.url} serves {', '.join(names)}; got --model {model}")
    chosen = model or names[0]
    entry: Mapping[str, Any] = next((e for e in listed if e.get("id") == chosen), {})
    server = str(entry["owned_by"]) if entry.get("owned_by") else None
    told = await client.fetch_json("GET", "/version")
    version = told.get("version") if isinstance(told, dict) else None
    page = await fetch_page(client)
    own: dict[str, Any] = {}
    if server == "sglang":
        info = await client.fetch_json("GET", "/get_server_info") or await client.fetch_json("GET", "/server_info")
        if isinstance(info, dict):
            own = dict(info)
            version = info.get("version", version)
    elif server == "stepfloor":
        info = await client.fetch_json("GET", "/server_info")
        if isinstance(info, dict):
            own = {key: value for key, value in info.items() if key != "version"}
    elif server == "llamacpp":
        props = await client.fetch_json("GET", "/props")
        if isinstance(props, dict):
            own = {key: value for key, value in props.items() if key != "chat_template"}
            version = props.get("build_info", version)
    meta = entry.get("meta") or {}
    longest = entry.get("max_model_len") or meta.get("n_ctx") or meta.get("n_ctx_train")
    target = Target(client.url, chosen, server, version, {**own, **(config or {})})
    return Found(target, longest, page, {} if page is None else page.info)


def read_server_config(text: str) -> dict[str, Any]:
    """A configuration as JSON, or the path of a JSON file. Raises UserError."""
    try:
        raw = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--server-config wants a JSON object or the path of one; got {text!r} ({error})") from None
    if not isinstance(raw, dict) or not raw:
        raise UserError(f"--server-config wants a JSON object with at least one key; got {text!r}")
    return raw
