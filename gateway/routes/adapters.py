"""Adapters: upload, look, promote, roll back, remove."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin_types import (
    AdapterList,
    AdapterView,
    AliasMove,
    Deleted,
    PathUpload,
    RollbackRequest,
    UploadForm,
    UploadView,
)
from gateway.errors import InvalidRequest
from gateway.parsing import parse_json, read_body
from gateway.removal import remove_adapter
from gateway.responses import json_response
from gateway.route_spec import RouteSpec
from gateway.services import gateway_of
from gateway.tenancy.keys import Access


async def upload_adapter(request: Request) -> Response:
    """Validate, store, register and probe a version; 200 when the same content is one already.

    202 while no worker can probe it: it becomes routable when one has.
    """
    gateway = gateway_of(request)
    async with gateway.uploads.staged(request) as upload:
        published = await gateway.publisher.publish(upload)
    if published.is_waiting:
        return json_response(published.view, status=202)
    return json_response(published.view, status=201 if published.is_new else 200)


async def list_adapters(request: Request) -> Response:
    """List all adapters that haven't been removed."""
    return json_response(AdapterList(data=await gateway_of(request).publisher.all_views()))


async def get_adapter(request: Request) -> Response:
    """Show one adapter with its versions and aliases."""
    return json_response(await gateway_of(request).publisher.view(request.path_params["name"]))


async def delete_adapter(request: Request) -> Response:
    """Give up the name; requests in flight finish, new ones find nothing."""
    name = request.path_params["name"]
    await remove_adapter(gateway_of(request), name)
    return json_response(Deleted(name=name))


async def move_alias(request: Request) -> Response:
    """Point an alias at another version, in one atomic step."""
    gateway = gateway_of(request)
    body = await read_body(request, max_bytes=gateway.settings.max_body_bytes)
    view = await gateway.publisher.promote(
        request.path_params["name"],
        alias=request.path_params["alias"],
        version_ref=parse_json(body, AliasMove).version,
        if_generation=_generation(request),
    )
    return json_response(view)


async def roll_back(request: Request) -> Response:
    """Swap an alias with its previous version."""
    gateway = gateway_of(request)
    body = await read_body(request, max_bytes=gateway.settings.max_body_bytes)
    wanted = parse_json(body, RollbackRequest) if body.strip() else RollbackRequest()
    view = await gateway.publisher.roll_back(request.path_params["name"], alias=wanted.alias)
    return json_response(view)


def _generation(request: Request) -> int | None:
    unknown = sorted(set(request.query_params) - {"if_generation"})
    if unknown:
        raise InvalidRequest(
            f"the parameter `{unknown[0][:40]}` isn't supported", param=unknown[0][:40]
        )
    text = request.query_params.get("if_generation")
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 18:
        raise InvalidRequest(
            f"if_generation is a whole number, not {text[:40]!r}", param="if_generation"
        )
    return int(text)


ROUTES = [
    RouteSpec(
        method="POST",
        path="/v1/adapters",
        endpoint=upload_adapter,
        access=Access.ADMIN,
        summary="Upload a version: files, an archive, or a path below an allowed root.",
        request=PathUpload,
        form=UploadForm,
        response=UploadView,
        statuses=(201, 200, 202),
    ),
    RouteSpec(
        method="GET",
        path="/v1/adapters",
        endpoint=list_adapters,
        access=Access.ADMIN,
        summary="List all adapters.",
        response=AdapterList,
    ),
    RouteSpec(
        method="GET",
        path="/v1/adapters/{name}",
        endpoint=get_adapter,
        access=Access.ADMIN,
        summary="Show one adapter with its versions and aliases.",
        response=AdapterView,
    ),
    RouteSpec(
        method="DELETE",
        path="/v1/adapters/{name}",
        endpoint=delete_adapter,
        access=Access.ADMIN,
        summary="Remove an adapter's name and all its versions.",
        response=Deleted,
    ),
    RouteSpec(
        method="PUT",
        path="/v1/adapters/{name}/aliases/{alias}",
        endpoint=move_alias,
        access=Access.ADMIN,
        summary="Point an alias at a version.",
        request=AliasMove,
        response=AdapterView,
        query={"if_generation": "Refuse with 409 unless the adapter is at this generation."},
    ),
    RouteSpec(
        method="POST",
        path="/v1/adapters/{name}/rollback",
        endpoint=roll_back,
        access=Access.ADMIN,
        summary="Swap an alias with its previous version.",
        request=RollbackRequest,
        response=AdapterView,
        body_required=False,
    ),
]
