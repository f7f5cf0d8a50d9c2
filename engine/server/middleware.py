"""What happens around every route: the cluster token, the instance header, unforeseen errors."""

import hmac
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.errors import CoreReported, error_response, internal_error, log_unforeseen

_PUBLIC_PATHS = frozenset({"/health"})


class InstanceHeader:
    """Marks every response with the start of the core that stood behind it."""

    def __init__(self, app: ASGIApp, *, instance: Callable[[], str]) -> None:
        self._app = app
        self._instance = instance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        instance = self._instance()

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-loraplex-instance"] = instance
            await send(message)

        await self._app(scope, receive, send_marked)


class ClusterTokenCheck:
    """Lets only holders of the cluster token through; without a token, everyone."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            await _unauthorized()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if self._token is None or scope["path"] in _PUBLIC_PATHS:
            return True
        given = Headers(scope=scope).get("authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode())


class UnforeseenErrors:
    """Turns an error that nobody raised on purpose into a 500 without its details."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def send_noting(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except Exception as problem:  # noqa: BLE001  the last door before the server's own
            log_unforeseen(problem)
            if not has_started:
                await error_response(internal_error())(scope, receive, send)


def _unauthorized() -> Response:
    error = CoreReported("the cluster token is missing or wrong", code="invalid_token", status=401)
    response = error_response(error)
    response.headers["www-authenticate"] = "Bearer"
    return response
