"""A server from start to end: take the port, start the engine, wait until it is warm, serve, drain, stop."""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from typing_extensions import override

from stepfloor.errors import UserError
from stepfloor.server.app import AppOptions, build_app
from stepfloor.server.client import EngineClient, EngineGoneError
from stepfloor.server.metrics import Metrics
from stepfloor.server.service import Service, ServiceConfig
from stepfloor.server.wire import EngineSpec
from stepfloor.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

GIB = 2.0**30
PROGRESS_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where to listen, and how to end.

    uds         a Unix socket in place of host and port; port 0 takes any that is free
    shutdown_s  how long requests that run may go on after SIGTERM
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    shutdown_s: int = 30
    log_level: str = "info"
    access_log: bool = True


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Everything `stepfloor serve` was told, resolved."""

    spec: EngineSpec
    service: ServiceConfig
    app: AppOptions
    listen: ListenOptions
    chat_template: Path | None = None
    formats: Mapping[str, str] = field(default_factory=dict)


class _Server(uvicorn.Server):
    """uvicorn, that says when it listens and tells the service when it begins to drain."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: str) -> None:
        super().__init__(config)
        self.service = service
        self.ready = ready

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("%s", self.ready)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        log.info("signal %d: no more requests are taken; %d are open", sig, self.service.client.num_open)
        self.service.draining = True
        super().handle_exit(sig, frame)


def serve(options: ServeOptions) -> None:
    """Serve until a signal says to stop. Raises UserError for a port in use and whatever the engine refuses."""
    tokenizer = Tokenizer.load(options.spec.directory, options.chat_template)
    # before the weights: a port that is taken must not be found out after minutes of loading
    listening = _bind(options.listen)
    # uvicorn raises the signal again when it has drained; without a handler that would end the process at once
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop_while_loading)
    try:
        asyncio.run(_serve(options, tokenizer, listening))
    except EngineGoneError as error:
        raise UserError(str(error)) from None
    except KeyboardInterrupt:
        log.info("interrupted")
    finally:
        listening.close()
        if options.listen.uds is not None:
            Path(options.listen.uds).unlink(missing_ok=True)


def _stop_while_loading(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _bind(listen: ListenOptions) -> socket.socket:
    try:
        if listen.uds is not None:
            bound = socket.socket(socket.AF_UNIX)
            bound.bind(listen.uds)
            return bound
        family, kind, _, _, address = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        # a port whose last user has just gone is free; one with a listener is not
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        return bound
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error  # an address too long for a socket has none
        where = listen.uds or f"{listen.host}:{listen.port}"
        raise UserError(f"{where} cannot be listened on ({reason}); stop what uses it or pass --port") from None


async def _serve(options: ServeOptions, tokenizer: Tokenizer, listening: socket.socket) -> None:
    begin = time.monotonic()
    client = EngineClient(options.spec)
    try:
        report = await client.connect(_Progress())
        metrics = Metrics(options.service.names[0], options.service.max_model_len, report)
        client.on_step = metrics.iteration_tokens.observe
        client.on_stats = lambda stats: _watch_acceptance(metrics, stats)
        service = Service(options.service, tokenizer, client, metrics)
        for line in report_lines(options, report):
            log.info("%s", line)
        listen = options.listen
        config = uvicorn.Config(
            build_app(service, replace(options.app, settings=settings_of(options, report))),
            ssl_keyfile=listen.ssl_keyfile,
            ssl_certfile=listen.ssl_certfile,
            log_level=listen.log_level,
            access_log=listen.access_log,
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=listen.shutdown_s,
            server_header=False,
        )
        where = listen.uds or "{}:{}".format(*listening.getsockname()[:2])
        scheme = "https" if listen.ssl_certfile else "http"
        pids = f"pid {os.getpid()}, engine pid {client.pid}"
        ready = f"ready after {time.monotonic() - begin:.1f} s, {pids}: {scheme}://{where}/v1"
        server = _Server(config, service, ready)
        watching = asyncio.create_task(_watch_progress(service, options.app.stall_s))
        try:
            await server.serve(sockets=[listening])
        except KeyboardInterrupt:
            pass  # the signal that ended it, raised again
        finally:
            watching.cancel()
    finally:
        await client.close()
    log.info("stopped")


class _Progress:
    """A line every few seconds while layers load; none for a model that takes less."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self.last > PROGRESS_EVERY_S:
            self.last = time.monotonic()
            log.info("loading: layer %d of %d", done, total)


def _formats(formats: Mapping[str, str]) -> str:
    """Stored formats, the common one first and the others with what they hold."""
    groups: dict[str, list[str]] = {}
    for group, name in formats.items():
        groups.setdefault(name, []).append(group)
    common = max(groups, key=lambda name: len(groups[name]), default="")
    others = [f"{name} of {', '.join(held)}" for name, held in groups.items() if name != common]
    return "; ".join([f"stored as {common}", *others])


def _watch_acceptance(metrics: Metrics, stats: Mapping[str, Any]) -> None:
    if metrics.take_stats(stats):
        log.warning(
            "drafts are hardly accepted any more (first position, step %d); each still costs its share of a step; "
            "drafted %s, accepted %s by position since the start",
            stats["steps"],
            stats["drafted"],
            stats["accepted"],
        )


async def _watch_progress(service: Service, stall_s: float) -> None:
    """Log once when the engine stands still with work to do, and once when it goes on."""
    standing = False
    while True:
        await asyncio.sleep(min(1.0, stall_s / 4))
        client = service.client
        stands = client.gone is None and client.silent_s > stall_s
        if stands and not standing:
            log.error(
                "no step has ended for %.0f s: step %d, engine pid %s, requests %s; /health answers 503",
                client.silent_s,
                client.stats.get("steps", 0),
                client.pid,
                ", ".join(client.open_requests()[:16]),
            )
        elif standing and not stands:
            log.warning("the engine goes on, step %d", client.stats.get("steps", 0))
        standing = stands


def settings_of(options: ServeOptions, report: Mapping[str, Any]) -> dict[str, Any]:
    """What /server_info tells. Paths stay with the server; of the checkpoint's, its name."""
    engine = asdict(options.spec.config)
    return {
        "model": options.service.names[0],
        "checkpoint": options.spec.directory.name,
        "formats": dict(options.formats),
        "engine": {name: value for name, value in engine.items() if not isinstance(value, Path)},
        "hf_overrides": options.spec.hf_overrides,
        "sampling": dict(options.service.sampling),
        "chat_template_kwargs": dict(options.service.template_kwargs),
        "device": report["device"],
        "operators": dict(report["backends"]),
    }


def report_lines(options: ServeOptions, report: Mapping[str, Any]) -> list[str]:
    """The start-up report."""
    config = options.spec.config
    total = report["weight_bytes"] + report["page_bytes"] + report["slot_bytes"]
    return [
        f"model {' '.join(options.service.names)} from {options.spec.directory}; {_formats(options.formats)}",
        f"memory {total / GIB:.2f} GiB: weights {report['weight_bytes'] / GIB:.2f}, pages "
        f"{report['page_bytes'] / GIB:.2f} ({report['pages']} of {report['block_size']} tokens), sequences "
        f"{report['slot_bytes'] / GIB:.2f} ({config.max_num_seqs} of up to {config.max_model_len} tokens)",
        f"floor of a step of one sequence with {config.spec_tokens} drafts: {report['step_bytes'] / 1e9:.3f} GB at the "
        f"{report['bandwidth_gbps']:.0f} GB/s this {report['device']} reads = {report['floor_ms']:.3f} ms",
        f"operators of a decode step: {_backends(report['backends'])}",
        f"loaded in {report['load_s']:.1f} s, warmed up in {report['warm_up_s']:.1f} s; acceptance "
        f"{config.acceptance}, prompt chunks of {config.chunk_tokens} tokens",
    ]


def _backends(backends: Mapping[str, str]) -> str:
    """Operators by what runs them: "Triton: embed, mtp_fuse; CUDA, streamed nvfp4: moe_down"."""
    by: dict[str, list[str]] = {}
    for name, backend in backends.items():
        by.setdefault(backend, []).append(name)
    if len(by) == 1:
        return f"{next(iter(by))}, all of them"
    return "; ".join(f"{backend}: {', '.join(names)}" for backend, names in sorted(by.items()))
