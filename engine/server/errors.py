"""Errors on the wire: OpenAI's error object, and how each of our errors becomes one."""

import logging
import math
import traceback
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import EngineError, InvalidRequest, Overloaded

logger = logging.getLogger(__name__)

CLIENT_GONE_STATUS = 499
CORE_RESTART_S = 5.0  # about what a new core takes; what a client is told to wait
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class ClientGone(Exception):
    """The client closed the connection before it was answered; nobody reads the answer."""


class Forbidden(EngineError):
    """The caller asks for something that this worker's operator has not allowed."""

    code = "not_allowed"
    status = 403


class BodyTooLarge(EngineError):
    """The request's body passes the limit."""

    code = "request_too_large"
    status = 413


class CoreReported(EngineError):
    """An error that the core sent, with its own code and status."""

    def __init__(
        self, message: str, *, code: str, status: int, problems: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.param = "model" if status in (404, 409) else None
        self.problems = tuple(problems)


def error_body(error: EngineError) -> dict[str, Any]:
    """OpenAI's error object, with all `problems` of a refused adapter."""
    detail: dict[str, Any] = {
        "message": str(error),
        "type": _error_type(error.status),
        "param": error.param,
        "code": error.code,
    }
    problems = getattr(error, "problems", ())
    if problems:
        detail["problems"] = list(problems)
    return {"error": detail}


def error_response(error: EngineError) -> Response:
    """The whole answer to a request that failed before its first byte."""
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=error.status,
        headers=_retry_headers(error),
        media_type="application/json",
    )


def internal_error() -> EngineError:
    """What a client sees of an error that we did not foresee."""
    return EngineError("the worker met an internal error")


def log_unforeseen(problem: BaseException) -> None:
    """Log where an unforeseen error came from, without values or host paths."""
    frames = traceback.extract_tb(problem.__traceback__)[-4:]
    where = " > ".join(f"{frame.name}:{frame.lineno}" for frame in frames)
    logger.error("unforeseen %s at %s", type(problem).__name__, where)


async def on_engine_error(_request: Request, error: Exception) -> Response:
    """Starlette's handler of everything that is raised on purpose."""
    assert isinstance(error, EngineError)
    return error_response(error)


async def on_client_gone(_request: Request, _error: Exception) -> Response:
    """Starlette's handler of a request whose client has left."""
    return Response(status_code=CLIENT_GONE_STATUS)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler of unknown routes and methods."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    message = f"{request.method} {request.url.path}: {phrase.lower()}"
    code = phrase.lower().replace(" ", "_")
    response = error_response(CoreReported(message, code=code, status=error.status_code))
    if error.headers:
        response.headers.update(error.headers)
    return response


def invalid(message: str, param: str) -> InvalidRequest:
    """A refusal that names the field."""
    return InvalidRequest(f"{param}: {message}", param=param)


def _error_type(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def _retry_headers(error: EngineError) -> dict[str, str]:
    """Tell the OpenAI client the truth about trying again."""
    if isinstance(error, Overloaded):
        wait_s = max(error.retry_after_s, 0.001)
    elif error.status == 503:
        wait_s = CORE_RESTART_S
    else:
        return {"x-should-retry": "false"} if error.status == 409 else {}
    return {
        "retry-after": str(math.ceil(wait_s)),
        "retry-after-ms": str(math.ceil(wait_s * 1000)),
        "x-should-retry": "true",
    }
