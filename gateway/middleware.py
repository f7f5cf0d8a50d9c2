"""What surrounds every route: who may pass, what went wrong, what was counted.

Plain ASGI classes; from the outside in: Observe, CatchErrors, RequireKey, RepeatAnswers,
CatchErrors once more, the routes.
"""

import logging
import secrets
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapters.errors import AdapterError
from gateway.errors import GatewayError, as_gateway_error, error_response
from gateway.metrics import GatewayMetrics
from gateway.route_spec import RouteSpec
from gateway.tenancy.keys import Access, KeyRing

logger = logging.getLogger(__name__)

SPEC_KEY = "loraplex.route"
UNMATCHED = "unmatched"


class RequireKey:
    """Lets a request pass if its key opens the route's access.

    Denies by default: what isn't in the table wants a data key before it learns that it is
    not there.
    """

    def __init__(self, app: ASGIApp, *, table: Sequence[RouteSpec], keys: KeyRing) -> None:
        self._app = app
        self._keys = keys
        self._routes = [(spec.as_route(), spec) for spec in table]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            spec = self._find(scope)
            scope[SPEC_KEY] = spec
            access = spec.access if spec is not None else Access.DATA
            self._keys.check(Headers(scope=scope).get("authorization"), access)
        await self._app(scope, receive, send)

    def _find(self, scope: Scope) -> RouteSpec | None:
        """Return the line that routing will choose; a wrong method counts as no line."""
        for route, spec in self._routes:
            if route.matches(scope)[0] is Match.FULL:
                return spec
        return None


class CatchErrors:
    """Turns errors into answers in OpenAI's shape; what nobody expected is logged and is a 500.

    After the first byte nothing can be answered any more; the error is logged and raised, which
    closes the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            return
        except (GatewayError, AdapterError) as error:
            if has_started:
                raise
            seen = as_gateway_error(error) if isinstance(error, AdapterError) else error
            await error_response(seen)(scope, receive, send)
        except Exception:
            logger.exception("unexpected error in %s %s", scope["method"], _route_name(scope))
            if has_started:
                raise
            await error_response(GatewayError("the gateway failed; its log says why"))(
                scope, receive, send
            )


class Observe:
    """Gives each answer a request id, and counts it by route and status."""

    def __init__(
        self, app: ASGIApp, *, metrics: GatewayMetrics, clock: Callable[[], float]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req-{secrets.token_hex(8)}"
        started = self._clock()
        status = 499  # what is counted when the client left before an answer began

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, observed_send)
        finally:
            route = _route_name(scope)
            method = scope["method"] if route != UNMATCHED else UNMATCHED
            self._metrics.requests.labels(route, method, str(status)).inc()
            self._metrics.request_seconds.labels(route).observe(self._clock() - started)


def _route_name(scope: Scope) -> str:
    spec = scope.get(SPEC_KEY)
    return spec.path if isinstance(spec, RouteSpec) else UNMATCHED
