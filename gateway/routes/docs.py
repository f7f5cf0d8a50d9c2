"""The API's description, for tools and for people."""

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from gateway.docs_page import docs_page
from gateway.responses import json_response
from gateway.route_spec import RouteSpec
from gateway.tenancy.keys import Access


async def openapi_json(request: Request) -> Response:
    """Return the OpenAPI document."""
    return json_response(request.app.state.openapi)


async def docs(request: Request) -> Response:
    """Return the document as a page."""
    return HTMLResponse(docs_page(request.app.state.openapi))


ROUTES = [
    RouteSpec(
        method="GET",
        path="/openapi.json",
        endpoint=openapi_json,
        access=Access.PUBLIC,
        summary="This API as an OpenAPI document.",
    ),
    RouteSpec(
        method="GET",
        path="/docs",
        endpoint=docs,
        access=Access.PUBLIC,
        summary="This API as a page for people.",
        media_type="text/html",
    ),
]
