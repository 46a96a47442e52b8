"""Refusals and faults as HTTP answers, in the form each API's clients expect."""

import json
from typing import Any

from starlette.responses import JSONResponse

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable_error"}
RETRY_AFTER_S = 1


class ApiError(Exception):
    """What a client is told in place of an answer."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


def error_body(error: ApiError, anthropic: bool = False) -> dict[str, Any]:
    """The JSON of an error."""
    default = "invalid_request_error" if error.status < 500 else "internal_error"
    if anthropic:
        kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else default)
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    kind = OPENAI_TYPES.get(error.status, default)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code or error.status}}


def error_response(error: ApiError, path: str) -> JSONResponse:
    """The answer to a request on this path; one that may be sent again says when."""
    headers = {"retry-after": str(RETRY_AFTER_S)} if error.status == 503 else None
    return JSONResponse(error_body(error, path.startswith("/v1/messages")), error.status, headers)


def error_event(error: ApiError) -> bytes:
    """The last event of an OpenAI stream that broke, followed by its end mark."""
    return b"data: " + json.dumps(error_body(error), ensure_ascii=False).encode() + b"\n\ndata: [DONE]\n\n"
