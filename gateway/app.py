"""The gateway as one ASGI application, wired in one screen."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TypedDict

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from gateway.errors import answer_http_exception
from gateway.metrics import GatewayMetrics
from gateway.middleware import CatchErrors, Observe, RequireKey
from gateway.openapi import openapi_document
from gateway.repeats import RepeatAnswers
from gateway.routes.table import TABLE
from gateway.services import Gateway, running_gateway
from gateway.settings import GatewaySettings
from gateway.tenancy.keys import KeyRing


class State(TypedDict):
    """What lifespan lends to every request."""

    gateway: Gateway


def create_app(
    settings: GatewaySettings, *, clock: Callable[[], float] = time.monotonic
) -> Starlette:
    """Return the gateway for `settings`; nothing is opened before its lifespan begins."""
    metrics = GatewayMetrics()
    keys = KeyRing(api_key=settings.api_key, admin_key=settings.admin_key)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[State]:
        async with running_gateway(settings, metrics=metrics, clock=clock) as gateway:
            yield {"gateway": gateway}

    app = Starlette(
        routes=[spec.as_route() for spec in TABLE],
        middleware=[
            Middleware(Observe, metrics=metrics, clock=clock),
            Middleware(CatchErrors),
            Middleware(RequireKey, table=TABLE, keys=keys),
            Middleware(RepeatAnswers),
            # Once more inside, so that a refusal is an answer, which can be repeated.
            Middleware(CatchErrors),
        ],
        exception_handlers={HTTPException: answer_http_exception},
        lifespan=lifespan,
    )
    app.state.openapi = openapi_document(TABLE, version=version("loraplex"))
    return app
