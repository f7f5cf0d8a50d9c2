"""vLLM's load and unload calls, for tools that know those: publish and move `default`, retire."""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from adapters.names import adapter_name_from_lora_name
from gateway.admin_types import LoadLoraRequest, PathUpload, UnloadLoraRequest
from gateway.errors import InvalidRequest
from gateway.parsing import blaming, parse_json, read_body
from gateway.removal import remove_adapter
from gateway.route_spec import RouteSpec
from gateway.services import gateway_of
from gateway.tenancy.keys import Access


async def load_lora_adapter(request: Request) -> Response:
    """Publish the adapter at a path, and move its `default` there."""
    gateway = gateway_of(request)
    body = await read_body(request, max_bytes=gateway.settings.max_body_bytes)
    asked = parse_json(body, LoadLoraRequest)
    with blaming("lora_name"):
        name = adapter_name_from_lora_name(asked.lora_name)
    if not asked.load_inplace and await gateway.publisher.has_name(name):
        raise InvalidRequest(
            f"the adapter {asked.lora_name!r} is there already; "
            "set `load_inplace` to true to move it to new weights",
            param="lora_name",
        )
    wanted = PathUpload(name=name, path=asked.lora_path, promote=True)
    async with gateway.uploads.staged_path(wanted, param="lora_path") as upload:
        published = await gateway.publisher.publish(upload)
    if published.is_waiting:
        return PlainTextResponse(
            f"LoRA adapter '{asked.lora_name}' is stored; it can be called as soon as a worker "
            "has probed it.",
            status_code=202,
        )
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    """Retire the adapter's name."""
    gateway = gateway_of(request)
    body = await read_body(request, max_bytes=gateway.settings.max_body_bytes)
    asked = parse_json(body, UnloadLoraRequest)
    with blaming("lora_name"):
        name = adapter_name_from_lora_name(asked.lora_name)
    await remove_adapter(gateway, name)
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


ROUTES = [
    RouteSpec(
        method="POST",
        path="/v1/load_lora_adapter",
        endpoint=load_lora_adapter,
        access=Access.ADMIN,
        summary="vLLM's call: publish from a path, and move `default` to it.",
        request=LoadLoraRequest,
        media_type="text/plain",
    ),
    RouteSpec(
        method="POST",
        path="/v1/unload_lora_adapter",
        endpoint=unload_lora_adapter,
        access=Access.ADMIN,
        summary="vLLM's call: remove the adapter's name.",
        request=UnloadLoraRequest,
        media_type="text/plain",
    ),
]
