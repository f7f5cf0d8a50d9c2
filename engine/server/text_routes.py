"""POST /tokenize and /detokenize, GET /tokenizer_info."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequest, UnknownAdapter
from engine.server.chat import render_messages
from engine.server.core_supervisor import RunningCore
from engine.server.openai_schema import DetokenizeRequest, TokenizeRequest
from engine.server.parsing import read_body
from engine.server.sampling_fields import check_token_ids
from engine.server.worker import worker_of


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of a text, how many they are, and how many fit."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The text of ids."""

    prompt: str


async def tokenize(request: Request) -> Response:
    """Turn a text, or a conversation through the chat template, into ids."""
    body = await read_body(request, TokenizeRequest)
    core = worker_of(request).core
    model = core.model
    await _check_model(core, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.messages is not None:
        with_prompt = body.add_generation_prompt is not False
        text = render_messages(model, body.messages, add_generation_prompt=with_prompt)
        add_special_tokens = bool(body.add_special_tokens)
    else:
        text = body.prompt or ""
        add_special_tokens = body.add_special_tokens is not False
    tokens = await model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return _json(
        TokenizeResponse(count=len(tokens), max_model_len=model.max_model_len, tokens=tokens)
    )


async def detokenize(request: Request) -> Response:
    """Turn ids into text, special tokens included."""
    body = await read_body(request, DetokenizeRequest)
    core = worker_of(request).core
    await _check_model(core, body.model)
    check_token_ids(body.tokens, vocab_size=core.ready.vocab_size, param="tokens")
    text = core.model.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return _json(DetokenizeResponse(prompt=text))


async def tokenizer_info(request: Request) -> Response:
    """Tell the tokenizer's configuration with its special tokens and chat template."""
    info = worker_of(request).core.model.tokenizer_info
    return Response(msgspec.json.encode(info), media_type="application/json")


async def _check_model(core: RunningCore, model: str | None) -> None:
    if model is None or model == core.model.base_id:
        return
    status = await core.client.status()
    if model not in {adapter.lora_id for adapter in status.adapters}:
        raise UnknownAdapter(f"the model {model!r} does not exist")


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
