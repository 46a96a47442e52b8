"""A hub id by its headers: the same census as the files themselves, and next to nothing fetched."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stepfloor.errors import UserError
from stepfloor.tools.inspect import summary
from stepfloor.weights import remote
from stepfloor.weights.checkpoint import open_checkpoint
from stepfloor.weights.remote import open_remote
from stepfloor.weights.sources import Hub
from tests.checkpoints import make_tiny


class Server(ThreadingHTTPServer):
    """A hub of one directory that counts what it sends."""

    directory: Path
    status = 200
    sent = 0


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        matched = re.fullmatch(r"/owner/tiny/resolve/main/(.+)", self.path)
        path = self.server.directory / (matched[1] if matched else "absent")
        if self.server.status != 200 or not path.is_file():
            self.send_response(404 if self.server.status == 200 else self.server.status)
            self.end_headers()
            return
        content, size = path.read_bytes(), path.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted:
            first, last = int(wanted[1]), min(int(wanted[2]), size - 1)
            content = content[first : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.server.sent += len(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Server, Hub]]:
    server = Server(("127.0.0.1", 0), Handler)
    server.directory = make_tiny(tmp_path, "nvidia-nvfp4")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server, Hub(tmp_path / "cache", endpoint=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


def test_headers_are_all_that_is_fetched(hub: tuple[Server, Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    server, reached = hub
    monkeypatch.setattr(remote, "_FIRST_BYTES", 4096)  # less than a header: the rest takes a second range
    there, here = open_remote("owner/tiny", reached), open_checkpoint(server.directory)
    assert {n: (w.format, w.shape, w.num_bytes) for n, w in there.weights.items()} == {
        n: (w.format, w.shape, w.num_bytes) for n, w in here.weights.items()
    }
    assert summary(there) | {"directory": ""} == summary(here) | {"directory": ""}
    headers = 0
    for path in server.directory.glob("*.safetensors"):
        headers += max(8 + int.from_bytes(path.read_bytes()[:8], "little"), 4096)
    documents = sum(p.stat().st_size for p in server.directory.glob("*.json"))
    assert server.sent <= headers + documents


def test_a_file_cut_on_the_hub_is_seen(hub: tuple[Server, Hub]) -> None:
    server, reached = hub
    path = server.directory / "model-fp8-mtp-ple.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match="the download was cut"):
        open_remote("owner/tiny", reached)


def test_a_file_the_index_names_and_the_hub_lacks(hub: tuple[Server, Hub]) -> None:
    server, reached = hub
    (server.directory / "model-fp8-mtp-ple.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-fp8-mtp-ple\.safetensors is named by .* but not there"):
        open_remote("owner/tiny", reached)


@pytest.mark.parametrize(("status", "wanted"), [(401, "gated or private"), (503, "answered 503"), (404, "no model")])
def test_refusals(hub: tuple[Server, Hub], status: int, wanted: str) -> None:
    server, reached = hub
    server.status = status
    with pytest.raises(UserError, match=wanted):
        open_remote("owner/tiny", reached)


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"could not be fetched .*; check the network"):
        open_remote("owner/tiny", Hub(tmp_path, endpoint="http://127.0.0.1:1"))


def test_broken_json(hub: tuple[Server, Hub]) -> None:
    server, reached = hub
    (server.directory / "generation_config.json").write_text(json.dumps([1]))
    with pytest.raises(UserError, match="wanted a JSON object; found list"):
        open_remote("owner/tiny", reached)
