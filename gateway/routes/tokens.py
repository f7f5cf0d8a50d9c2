"""Tokenize, detokenize and tokenizer_info: a worker's tokenizer, as evaluation harnesses use it."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.dispatch import Call
from gateway.errors import InvalidRequest, WorkerUnavailable
from gateway.model_names import Target
from gateway.openai_types import DetokenizeRequest, TokenizeRequest
from gateway.parsing import parse_json, parse_tokenize, read_body
from gateway.route_spec import RouteSpec
from gateway.routes.inference import resolved, response_to
from gateway.services import Gateway, gateway_of
from gateway.tenancy.keys import Access
from gateway.tenancy.tenants import tenant_of


async def tokenize(request: Request) -> Response:
    """Count and list the tokens of a prompt, as the worker would see them."""
    body = await read_body(request, max_bytes=gateway_of(request).settings.max_body_bytes)
    return await _asked(request, parse_tokenize(body))


async def detokenize(request: Request) -> Response:
    """Return the text of tokens, special ones included."""
    body = await read_body(request, max_bytes=gateway_of(request).settings.max_body_bytes)
    return await _asked(request, parse_json(body, DetokenizeRequest))


async def tokenizer_info(request: Request) -> Response:
    """Tell the tokenizer's configuration, its special tokens and the chat template."""
    target, from_snapshot = await _target(request, request.query_params.get("model"))
    return _answer(request, b"", target, from_snapshot=from_snapshot)


async def _asked(request: Request, asked: TokenizeRequest | DetokenizeRequest) -> Response:
    target, from_snapshot = await _target(request, asked.model)
    sent = msgspec.structs.replace(asked, model=target.base_id)
    return _answer(request, msgspec.json.encode(sent), target, from_snapshot=from_snapshot)


def _answer(request: Request, body: bytes, target: Target, *, from_snapshot: bool) -> Response:
    # The base's tokenizer serves all its adapters, so nothing is loaded for this.
    call = Call(
        method=request.method,
        path=request.url.path,
        body=body,
        target=target,
        tenant=tenant_of(request),
        streams=False,
        loads_adapter=False,
    )
    gateway = gateway_of(request)
    return response_to(gateway, call, shows_usage=False, from_snapshot=from_snapshot)


async def _target(request: Request, model: str | None) -> tuple[Target, bool]:
    gateway = gateway_of(request)
    return await (_only_base(gateway) if model is None else resolved(gateway, model))


async def _only_base(gateway: Gateway) -> tuple[Target, bool]:
    """Return the base of all workers, for clients that name none."""
    view = await gateway.reader.for_model("")
    bases = sorted({worker.base_id for worker in gateway.pool.views()})
    if not bases:
        raise WorkerUnavailable("no worker is there")
    if len(bases) > 1:
        raise InvalidRequest(f"`model` must say which: {', '.join(bases)}", param="model")
    return Target(public_name=bases[0], base_id=bases[0]), view.from_snapshot


ROUTES = [
    RouteSpec(
        method="POST",
        path="/tokenize",
        endpoint=tokenize,
        access=Access.DATA,
        summary="Count and list the tokens of a prompt or of messages.",
        request=TokenizeRequest,
    ),
    RouteSpec(
        method="POST",
        path="/detokenize",
        endpoint=detokenize,
        access=Access.DATA,
        summary="Return the text of token ids.",
        request=DetokenizeRequest,
    ),
    RouteSpec(
        method="GET",
        path="/tokenizer_info",
        endpoint=tokenizer_info,
        access=Access.DATA,
        summary="Tell the tokenizer's configuration, special tokens and chat template.",
        query={"model": "a base or an adapter; may be left out where there is one base"},
    ),
]
