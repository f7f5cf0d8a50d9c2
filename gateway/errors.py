"""What can go wrong at the gateway, by who must act, and how it looks on the wire.

GatewayError
├── InvalidRequest        the caller: a field is wrong; `param` names it
│   ├── BodyTooLarge      the caller: a limit is named with both numbers
│   └── BodyTooSlow       the caller: the body stopped coming in
├── Unauthorized          the caller: no key, or one that nobody gave out
├── Forbidden             the caller: the key is good, but not for this
├── ModelNotFound         the caller's view is old: no such base, adapter, version or alias
├── NotFound              the caller's view is old: no such address
├── MethodNotAllowed      the caller: the address exists, the method doesn't
├── WorkerUnavailable     try later: no worker can serve it now; `retry_after_s` says when
├── RegistryUnavailable   try later: Redis can't be reached and there's no snapshot to serve from
├── StoreUnavailable      the operator: the store's files can't be used
├── DeadlineExceeded      try later: a worker was silent for too long
├── WorkerBroken          the operator: a worker answered what the protocol doesn't know
└── WorkerRefused         a worker's own refusal, passed on as it is

Errors of the `adapters` package become answers through `ADAPTER_ANSWERS`.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from adapters.errors import (
    AdapterConflict,
    AdapterError,
    AdapterInvalid,
    AdapterNameInvalid,
    AdapterNotFound,
    AdapterTooLarge,
    RegistryBroken,
    StoreBroken,
)

logger = logging.getLogger(__name__)

TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}


class GatewayError(Exception):
    """Base of every error that the gateway reports on purpose; `code` goes on the wire."""

    code = "internal_error"
    status = 500
    param: str | None = None
    retry_after_s: float | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(GatewayError):
    """The body, a field or a parameter has a value that can't be served."""

    code = "invalid_request"
    status = 400


class BodyTooLarge(InvalidRequest):
    """The body passes the gateway's limit."""

    code = "body_too_large"
    status = 413


class BodyTooSlow(InvalidRequest):
    """The body comes in too slowly, or not at all any more."""

    code = "body_too_slow"
    status = 408


class Unauthorized(GatewayError):
    """There is no key in the request, or an unknown one."""

    code = "invalid_api_key"
    status = 401


class Forbidden(GatewayError):
    """The key is known, but doesn't open this."""

    code = "not_allowed"
    status = 403


class ModelNotFound(GatewayError):
    """`model` names nothing that can be served; it never falls back to the base."""

    code = "model_not_found"
    status = 404

    def __init__(self, message: str, *, param: str = "model") -> None:
        super().__init__(message, param=param)


class NotFound(GatewayError):
    """No route has this path."""

    code = "not_found"
    status = 404


class MethodNotAllowed(GatewayError):
    """The path exists, but not with this method."""

    code = "method_not_allowed"
    status = 405


class WorkerUnavailable(GatewayError):
    """No worker can take the request now."""

    code = "no_worker"
    status = 503

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RegistryUnavailable(GatewayError):
    """Redis can't be reached, and what is asked can't be answered without it."""

    code = "registry_unavailable"
    status = 503
    retry_after_s = 1.0


class StoreUnavailable(GatewayError):
    """The store's files can't be read or written; the log says which."""

    code = "store_unavailable"
    status = 503


class DeadlineExceeded(GatewayError):
    """A worker took the request and then sent nothing for too long."""

    code = "deadline_exceeded"
    status = 504


class WorkerBroken(GatewayError):
    """A worker sent an answer that makes no sense."""

    code = "bad_worker_answer"
    status = 502


class WorkerRefused(GatewayError):
    """A worker refused the request in words of its own; they are passed on."""

    def __init__(
        self,
        *,
        status: int,
        message: str,
        param: str | None,
        code: str,
        retry_after_s: float | None = None,
        problems: Sequence[str] = (),
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.retry_after_s = retry_after_s
        self.problems = tuple(problems)


# Status of each error of the adapters package. A test holds it complete.
ADAPTER_ANSWERS: dict[type[AdapterError], int] = {
    AdapterInvalid: 422,
    AdapterNameInvalid: 400,
    AdapterTooLarge: 413,
    AdapterNotFound: 404,
    AdapterConflict: 409,
    StoreBroken: 503,
    RegistryBroken: 503,
}


def as_gateway_error(error: AdapterError) -> GatewayError:
    """Translate an error of the adapters package into what the caller may see."""
    if isinstance(error, RegistryBroken):
        return RegistryUnavailable("the registry can't be reached; try again in a moment")
    if isinstance(error, StoreBroken):
        logger.error("the store is broken: %s", error)
        return StoreUnavailable("the adapter store can't be used now; the gateway's log says why")
    for kind, status in ADAPTER_ANSWERS.items():
        if isinstance(error, kind):
            return WorkerRefused(
                status=status,
                message=str(error),
                param=None,
                code=error.code,
                problems=getattr(error, "problems", ()),
            )
    return GatewayError(str(error), code=error.code)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer what Starlette refuses by itself: unknown paths, methods, broken forms."""
    assert isinstance(error, HTTPException)
    seen: GatewayError
    if error.status_code == 404:
        seen = NotFound(f"there is no {request.url.path[:200]}; /docs lists what there is")
    elif error.status_code == 405:
        seen = MethodNotAllowed(f"{request.method} isn't possible here")
    elif error.status_code < 500:
        seen = InvalidRequest(error.detail)
    else:
        seen = GatewayError(error.detail)
    return error_response(seen)


def error_body(error: GatewayError) -> dict[str, Any]:
    """Return OpenAI's error object for `error`."""
    body: dict[str, Any] = {
        "message": str(error),
        "type": TYPE_OF_STATUS.get(error.status, "server_error"),
        "param": error.param,
        "code": error.code,
    }
    problems = getattr(error, "problems", ())
    if problems:
        body["problems"] = list(problems)
    return {"error": body}


def error_headers(error: GatewayError) -> dict[str, str]:
    """Tell the OpenAI SDK whether, and when, to try again."""
    headers: dict[str, str] = {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
        headers["x-should-retry"] = "true"
    elif error.status == 409:
        headers["x-should-retry"] = "false"
    if error.status == 408:
        # Who still sends drops by drop isn't listened to any longer.
        headers["connection"] = "close"
    return headers


def error_response(error: GatewayError) -> Response:
    """Return the answer for `error`, in OpenAI's shape."""
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=error.status,
        media_type="application/json",
        headers=error_headers(error),
    )
