"""Chat completions, completions and tokenize: parsed once, resolved, sent to a worker."""

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
    TokenizeRequest,
)
from gateway.parsing import parse_chat, parse_completion, parse_tokenize, read_body
from gateway.route_spec import RouteSpec
from gateway.services import Gateway, gateway_of
from gateway.streaming import InferenceResponse
from gateway.tenancy.keys import Access

G = TypeVar("G", bound=GenerationFields)


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    gateway = gateway_of(request)
    body = await read_body(request, max_bytes=gateway.settings.max_body_bytes)
    return await _generation(gateway, "/v1/chat/completions", parse_chat(body))


async def completions(request: Request) -> Response:
    """Continue one or several prompts."""
    gateway = gateway_of(request)
    body = await read_body(request, max_bytes=gateway.settings.max_body_bytes)
    return await _generation(gateway, "/v1/completions", parse_completion(body))


async def tokenize(request: Request) -> Response:
    """Count and list the tokens of a prompt, as the worker would see them."""
    gateway = gateway_of(request)
    body = await read_body(request, max_bytes=gateway.settings.max_body_bytes)
    asked = parse_tokenize(body)
    target, from_snapshot = await _resolved(gateway, asked.model)
    # The base's tokenizer serves all its adapters, so nothing is loaded for this.
    sent = msgspec.structs.replace(asked, model=target.base_id)
    call = Call(
        path="/tokenize",
        body=msgspec.json.encode(sent),
        target=target,
        streams=False,
        loads_adapter=False,
    )
    return _response(gateway, call, shows_usage=False, from_snapshot=from_snapshot)


async def _generation(gateway: Gateway, path: str, asked: GenerationFields) -> Response:
    target, from_snapshot = await _resolved(gateway, asked.model)
    call = Call(
        path=path,
        body=msgspec.json.encode(_for_worker(asked, target)),
        target=target,
        streams=bool(asked.stream),
    )
    options = asked.stream_options
    shows_usage = bool(options is not None and options.include_usage)
    return _response(gateway, call, shows_usage=shows_usage, from_snapshot=from_snapshot)


async def _resolved(gateway: Gateway, model: str) -> tuple[Target, bool]:
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


def _response(
    gateway: Gateway, call: Call, *, shows_usage: bool, from_snapshot: bool
) -> InferenceResponse:
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
    RouteSpec(
        method="POST",
        path="/tokenize",
        endpoint=tokenize,
        access=Access.DATA,
        summary="Count and list the tokens of a prompt or of messages.",
        request=TokenizeRequest,
    ),
]
