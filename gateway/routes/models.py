"""The names that a request's `model` may have."""

from starlette.requests import Request
from starlette.responses import Response

from adapters.names import DEFAULT_ALIAS
from gateway.admin_types import ModelCard, ModelList
from gateway.registry_reader import REGISTRY_HEADER
from gateway.responses import json_response
from gateway.route_spec import RouteSpec
from gateway.services import gateway_of
from gateway.tenancy.keys import Access


async def list_models(request: Request) -> Response:
    """List the bases first, then `base:adapter` for each adapter that can be called."""
    view = await gateway_of(request).reader.everything()
    cards = [ModelCard(id=base_id, root=base_id) for base_id in sorted(view.bases)]
    for name, record in sorted(view.records.items()):
        digest = record.aliases.get(DEFAULT_ALIAS)
        if digest is not None:
            cards.append(
                ModelCard(id=f"{record.base_id}:{name}", root=digest, parent=record.base_id)
            )
    headers = {REGISTRY_HEADER: "snapshot"} if view.from_snapshot else None
    return json_response(ModelList(data=cards), headers=headers)


ROUTES = [
    RouteSpec(
        method="GET",
        path="/v1/models",
        endpoint=list_models,
        access=Access.DATA,
        summary="List the base models, then `base:adapter` for each adapter.",
        response=ModelList,
    ),
]
