"""The HTTP application: routes, keys, request ids, and every refusal in the form its client expects."""

import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepfloor.errors import QueueFullError, UserError
from stepfloor.server import chat, completions, messages, responses
from stepfloor.server.client import EngineGoneError
from stepfloor.server.faults import ApiError, error_response
from stepfloor.server.protocol import DetokenizeRequest, TokenizeRequest
from stepfloor.server.service import Service, message_dicts
from stepfloor.server.sse import ClientGoneError

log = logging.getLogger(__name__)

# routes that a load balancer or a scraper asks, without a key
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/load", "/metrics"})
MAX_BODY_BYTES = 64 << 20
# half of a character outside the basic plane, alone: legal in JSON, no text
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class AppOptions:
    """What the application itself is told.

    stall_s      silence of an engine with requests after which /health answers 503
    profile_dir  where /stop_profile writes; None: profiling is off
    settings     what /server_info tells: all that decides what is computed, resolved, and nothing that is measured
    """

    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    stall_s: float = 60.0
    profile_dir: Path | None = None
    log_requests: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def build_app(service: Service, options: AppOptions) -> FastAPI:
    """The application of one engine."""
    app = FastAPI(title="stepfloor", version=version("stepfloor"), root_path=options.root_path)
    app.state.service = service
    app.state.options = options
    for module in (completions, chat, responses, messages):
        app.include_router(module.router)
    _add_plain_routes(app)
    _add_error_handlers(app)
    app.add_middleware(_Gate, service=service, options=options)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=options.allowed_origins,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
    )
    return app


def _add_plain_routes(app: FastAPI) -> None:
    service: Service = app.state.service
    options: AppOptions = app.state.options

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The model, under each of its names."""
        return {"object": "list", "data": [_model_json(service, name) for name in service.config.names]}

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        """The model, if it has this name."""
        return _model_json(service, service.check_model(name))

    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        """200 while the engine lives, gets on with its work and takes more."""
        trouble = trouble_of(service, options)
        return Response(status_code=200) if trouble is None else error_response(ApiError(503, trouble), "/health")

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        """Of this package."""
        return {"version": version("stepfloor")}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """The resolved configuration: servers that tell the same can be compared."""
        return {"version": version("stepfloor"), **options.settings}

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Requests that are being served or wait."""
        return {"server_load": service.client.num_open}

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        service.metrics.stalled.set(service.client.silent_s)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Ids of a prompt, or of the prompt that messages make."""
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "send either prompt or messages", param="prompt")
        if body.prompt is not None:
            prompt = await service.text_prompt(body.prompt)
        else:
            prompt = await service.chat_prompt(
                message_dicts(body.messages or ()),
                [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
                body.chat_template_kwargs,
                None,
                body.add_generation_prompt is not False,
            )
        answer: dict[str, Any] = {
            "count": len(prompt.token_ids),
            "max_model_len": service.config.max_model_len,
            "tokens": list(prompt.token_ids),
        }
        if body.return_token_strs:
            answer["token_strs"] = [service.tokenizer.decode([token]) for token in prompt.token_ids]
        return answer

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """Text of ids."""
        service.check_model(body.model)
        if any(token >= service.config.vocab_size for token in body.tokens):
            raise ApiError(400, f"token ids must be 0 to {service.config.vocab_size - 1}", param="tokens")
        return {"prompt": service.tokenizer.decode(body.tokens)}

    @app.post("/start_profile")
    async def start_profile() -> dict[str, str]:
        """Record the engine's operators from the next step on."""
        directory = _profile_dir(options)
        await service.client.profile(True, directory)
        return {"status": "recording"}

    @app.post("/stop_profile")
    async def stop_profile() -> dict[str, str]:
        """End the recording; answers with the file it was written to."""
        directory = _profile_dir(options)
        answer = await service.client.profile(False, directory)
        return {"status": "written", "path": answer["path"]}


def trouble_of(service: Service, options: AppOptions) -> str | None:
    """Why this server should get no requests, if there is a reason."""
    client = service.client
    if client.gone is not None:
        return client.gone
    if client.silent_s > options.stall_s:
        return (
            f"the engine has been silent for {client.silent_s:.0f} s at step {client.stats.get('steps', 0)} with "
            f"{client.num_open} requests open"
        )
    return "the server is shutting down" if service.draining else None


def _profile_dir(options: AppOptions) -> Path:
    if options.profile_dir is None:
        raise ApiError(400, "profiling is off; start the server with --profiler-config '{\"torch_profiler_dir\": DIR}'")
    return options.profile_dir


def _model_json(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "stepfloor",
        "root": service.config.names[0],
        "parent": None,
        "max_model_len": service.config.max_model_len,
    }


def _add_error_handlers(app: FastAPI) -> None:
    service: Service = app.state.service

    async def answer(request: Request, error: Exception) -> Response:
        fault = _fault_of(error)
        if fault.status >= 500 and fault.status not in (503, 504):
            log.error("%s %s: %s", request.method, request.url.path, fault.message)
        if fault.status in (400, 404, 413, 503):
            service.metrics.refuse("queue_full" if isinstance(error, QueueFullError) else str(fault.status))
        return error_response(fault, request.url.path)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    kinds: Sequence[type[Exception]] = (
        ApiError,
        UserError,
        EngineGoneError,
        RequestValidationError,
        HTTPException,
        Exception,
    )
    for kind in kinds:
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(ClientGoneError, gone)


def _fault_of(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), "queue_full")
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return ApiError(400, f"{where}: {first['msg']}" if where else str(first["msg"]), param=where or None)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail)
    if isinstance(error, EngineGoneError):
        return ApiError(503, str(error), "engine_gone")
    return ApiError(500, f"{type(error).__name__} in the server; its log says more")


class _Gate:
    """Before any route: the key, the size and the letters of the body, and a request id in every answer."""

    def __init__(self, app: ASGIApp, service: Service, options: AppOptions) -> None:
        self.app = app
        self.service = service
        self.options = options
        self.keys = [key.encode() for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        request_id = headers.get(b"x-request-id") or secrets.token_hex(16).encode()
        begin = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            receive = await self._admit(scope, headers, receive)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send_with_id)
        else:
            await self.app(scope, receive, send_with_id)
        if self.options.log_requests:
            seconds = time.monotonic() - begin
            log.info("%s %s %s %d %.3f s", request_id.decode(), scope["method"], scope["path"], status, seconds)

    async def _admit(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """Let a request in, its body read; raises ApiError for one that is not."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self.keys and path not in OPEN_PATHS and scope["method"] != "OPTIONS" and not self._has_key(headers):
            raise ApiError(401, "wrong or missing key; send it as Authorization: Bearer KEY", "invalid_api_key")
        if self.service.draining and path not in OPEN_PATHS:
            raise ApiError(503, "the server is shutting down", "shutting_down")
        if scope["method"] != "POST":
            return receive
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            body += message.get("body", b"")
            if len(body) > MAX_BODY_BYTES:
                raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
            if not message.get("more_body", False):
                break
        if _SURROGATE.search(body) and _lone_surrogates(bytes(body)):
            raise ApiError(400, "the body holds half of a surrogate pair, which is no text")
        return _replay(bytes(body), receive)

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"")
        given = given[7:] if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        # every key is compared, so that the time tells nothing
        return sum(hmac.compare_digest(given, key) for key in self.keys) > 0


def _lone_surrogates(body: bytes) -> bool:
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False  # refused later, for what it is
    return False


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
