"""Bodies into typed requests, and what is wrong with them into words that name the field."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Message, Receive

from adapters.errors import AdapterNameInvalid
from gateway.errors import BodyTooLarge, InvalidRequest
from gateway.openai_types import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    TokenizeRequest,
)

T = TypeVar("T")

_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<key>key` in `)?(?P<path>[^`]*)`)?$", re.DOTALL)
_ANY_KEY = "[...]"  # msgspec's words for a place in an object with free keys
_FIELD = re.compile(r"(?P<how>unknown|required) field `(?P<name>[^`]*)`")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Return the whole body, or raise BodyTooLarge without reading past the limit."""
    _check_announced_length(request, max_bytes=max_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _too_large(len(body), max_bytes)
    return bytes(body)


def with_bounded_body(request: Request, *, max_bytes: int) -> Request:
    """Return the same request, whose body raises BodyTooLarge once it passes the limit."""
    _check_announced_length(request, max_bytes=max_bytes)
    return Request(request.scope, _bounded(request.receive, max_bytes=max_bytes))


def parse_json(body: bytes, kind: type[T]) -> T:
    """Decode `body` as `kind`, or raise InvalidRequest with the field in `param`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(error, body) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body isn't JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Let a name of a form that isn't allowed be an invalid request that names `param`."""
    try:
        yield
    except AdapterNameInvalid as error:
        raise InvalidRequest(str(error), param=param, code=error.code) from None


def parse_chat(body: bytes) -> ChatCompletionRequest:
    """Decode and check a chat completion request."""
    request = parse_json(body, ChatCompletionRequest)
    _check_generation(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs wants `logprobs`: true", param="top_logprobs")
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Decode and check a completion request."""
    request = parse_json(body, CompletionRequest)
    _check_generation(request)
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("max_tokens may be 0 only with `echo`: true", param="max_tokens")
    if isinstance(request.prompt, list) and len({type(item) for item in request.prompt}) > 1:
        raise InvalidRequest(
            "prompt is a string, a list of strings, a list of token ids, or a list of such lists; "
            "not a mixture",
            param="prompt",
        )
    return request


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Decode and check a tokenize request."""
    request = parse_json(body, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give exactly one of `prompt` and `messages`", param="prompt")
    if request.prompt is not None and request.add_generation_prompt is not None:
        raise InvalidRequest(
            "add_generation_prompt goes with `messages`, not with `prompt`",
            param="add_generation_prompt",
        )
    return request


def _check_generation(request: GenerationFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options wants `stream`: true", param="stream_options")


def _explain(error: msgspec.ValidationError, body: bytes) -> InvalidRequest:
    matched = _AT.match(str(error))
    assert matched is not None
    what, path = matched["what"], (matched["path"] or "$").removeprefix("$").removeprefix(".")
    path = path.replace(_ANY_KEY, "")
    if matched["key"]:
        what = f"a key: {_lower_first(what)}"
    field = _FIELD.search(what)
    if field is not None:
        param = f"{path}.{field['name']}" if path else field["name"]
        words = "isn't supported" if field["how"] == "unknown" else "is missing"
        code = "unsupported_field" if field["how"] == "unknown" else "missing_field"
        return InvalidRequest(f"the field `{param}` {words}", param=param, code=code)
    if not path:
        return InvalidRequest(f"the body: {_lower_first(what)}")
    return InvalidRequest(
        f"the field `{path}`: {_lower_first(what)}{_offending(body, path)}", param=path
    )


def _offending(body: bytes, path: str) -> str:
    """Return `, not <value>` for numbers and booleans; text may be a prompt and isn't repeated."""
    try:
        value: Any = msgspec.json.decode(body)
        for name, index in _STEP.findall(path):
            value = value[int(index)] if index else value[name]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return ""
    if isinstance(value, bool | int | float):
        return f", not {msgspec.json.encode(value).decode()}"
    return ""


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _check_announced_length(request: Request, *, max_bytes: int) -> None:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(int(announced), max_bytes)


def _too_large(num_bytes: int, max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has {num_bytes} bytes or more; this gateway takes at most {max_bytes}"
    )


def _bounded(receive: Receive, *, max_bytes: int) -> Receive:
    num_bytes = 0

    async def bounded_receive() -> Message:
        nonlocal num_bytes
        message = await receive()
        if message["type"] == "http.request":
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise _too_large(num_bytes, max_bytes)
        return message

    return bounded_receive
