"""One line per route: the table that routing, access, metrics and OpenAPI all read."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.tenancy.keys import Access

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSpec:
    """A route, who may call it, and the types of its bodies.

    request, response   msgspec types, or None for no body or one that isn't JSON
    form                the type of a multipart body taken beside, or instead of, JSON
    media_type          of an answer that isn't JSON
    query               names of query parameters, with a sentence each
    statuses            of the good answers, the usual one first
    """

    method: str
    path: str
    endpoint: Endpoint
    access: Access
    summary: str
    request: Any = None
    form: Any = None
    response: Any = None
    media_type: str = "application/json"
    body_required: bool = True
    streams: bool = False
    query: dict[str, str] = field(default_factory=dict)
    statuses: tuple[int, ...] = (200,)

    def as_route(self) -> Route:
        """Return Starlette's route for this line."""
        return Route(self.path, self.endpoint, methods=[self.method])
