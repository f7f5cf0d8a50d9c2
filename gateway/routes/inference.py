"""Chat completions and completions: parsed once, resolved, sent to a worker."""

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.dispatch import Call
from gateway.errors import ModelNotFound, RegistryUnavailable
from gateway.model_names import Target, resolve_model
from gateway.openai_types import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    StreamOptions,
)
from gateway.parsing import parse_chat, parse_completion, read_body
from gateway.route_spec import RouteSpec
from gateway.services import Gateway, gateway_of
from gateway.streaming import InferenceResponse
from gateway.tenancy.keys import Access
from gateway.tenancy.tenants import tenant_of

G = TypeVar("G", bound=GenerationFields)


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, max_bytes=gateway_of(request).settings.max_body_bytes)
    return await _generation(request, parse_chat(body))


async def completions(request: Request) -> Response:
    """Continue one or several prompts."""
    body = await read_body(request, max_bytes=gateway_of(request).settings.max_body_bytes)
    return await _generation(request, parse_completion(body))


async def _generation(request: Request, asked: GenerationFields) -> Response:
    gateway = gateway_of(request)
    target, from_snapshot = await resolved(gateway, asked.model)
    call = Call(
        path=request.url.path,
        body=msgspec.json.encode(_for_worker(asked, target)),
        target=target,
        tenant=tenant_of(request),
        streams=bool(asked.stream),
    )
    options = asked.stream_options
    shows_usage = bool(options is not None and options.include_usage)
    return response_to(gateway, call, shows_usage=shows_usage, from_snapshot=from_snapshot)


async def resolved(gateway: Gateway, model: str) -> tuple[Target, bool]:
    """Return what `model` names, and whether only the local copy of the registry says so."""
    view = await gateway.reader.for_model(model)
    try:
        target = resolve_model(
            model,
            model_name=view.model_name,
            record=view.record,
            known_names=gateway.reader.public_names,
        )
    except ModelNotFound as error:
        if view.from_snapshot:
            # It may have been published since the copy was made, so nobody can say that it isn't.
            raise RegistryUnavailable(f"the registry can't be reached, and {error}") from None
        raise
    return target, view.from_snapshot


def _for_worker(asked: G, target: Target) -> G:
    """Return the request with the worker's model name, and usage asked for in every stream."""
    options = None
    if asked.stream:
        shown = asked.stream_options or StreamOptions()
        continuous = bool(shown.include_usage and shown.continuous_usage_stats)
        options = StreamOptions(
            include_usage=True, continuous_usage_stats=True if continuous else None
        )
    return msgspec.structs.replace(
        asked,
        model=target.worker_model,
        stream_options=options,
        user=None,
        metadata=None,
        store=None,
    )


def response_to(
    gateway: Gateway, call: Call, *, shows_usage: bool, from_snapshot: bool
) -> InferenceResponse:
    """Return the answer to `call`, which is made when it is sent."""
    return InferenceResponse(
        call,
        dispatcher=gateway.dispatcher,
        metrics=gateway.metrics,
        clock=gateway.clock,
        shows_usage=shows_usage,
        from_snapshot=from_snapshot,
    )


ROUTES = [
    RouteSpec(
        method="POST",
        path="/v1/chat/completions",
        endpoint=chat_completions,
        access=Access.DATA,
        summary="Answer a conversation with a base or an adapter.",
        request=ChatCompletionRequest,
        streams=True,
    ),
    RouteSpec(
        method="POST",
        path="/v1/completions",
        endpoint=completions,
        access=Access.DATA,
        summary="Continue one or several prompts.",
        request=CompletionRequest,
        streams=True,
    ),
]
