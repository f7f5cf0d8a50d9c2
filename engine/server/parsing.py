"""From a request's bytes to a checked body, naming the field of what is wrong."""

import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from engine.errors import InvalidRequest
from engine.server.errors import BodyTooLarge, ClientGone

MAX_BODY_BYTES = 16 * 1024 * 1024

_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_MISSING_FIELD = re.compile(r"missing required field `([^`]*)`")
_PATH = re.compile(r" - at `(key` in `)?\$\.?([^`]*)`$")
_ANY_KEY = "[...]"  # msgspec's words for a place in an object with free keys

BodyT = TypeVar("BodyT")


async def read_body(request: Request, body_type: type[BodyT]) -> BodyT:
    """Read and check a JSON body; InvalidRequest names the field."""
    return parse(await _read(request), body_type)


def parse(raw: bytes, body_type: type[BodyT]) -> BodyT:
    """Check a JSON body; InvalidRequest names the field."""
    try:
        return msgspec.json.decode(raw, type=body_type)
    except msgspec.ValidationError as problem:
        raise _refusal(str(problem)) from None
    except msgspec.DecodeError as problem:
        raise InvalidRequest(f"the body is not JSON: {problem}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


async def _read(request: Request) -> bytes:
    pieces = []
    num_bytes = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        num_bytes += len(pieces[-1])
        if num_bytes > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return b"".join(pieces)


def _refusal(text: str) -> InvalidRequest:
    """Turn msgspec's words into ours: which field, and what is wrong with it."""
    at = _PATH.search(text)
    path = at[2].replace(_ANY_KEY, "") if at else ""
    words = text[: at.start()] if at else text
    if at and at[1]:
        words = f"a key: {words[:1].lower()}{words[1:]}"
    if unknown := _UNKNOWN_FIELD.search(words):
        name = _join(path, unknown[1])
        message = f"{name!r} is not a supported field"
        return InvalidRequest(message, param=name, code="unsupported_field")
    if missing := _MISSING_FIELD.search(words):
        name = _join(path, missing[1])
        return InvalidRequest(f"{name!r} is required", param=name, code="missing_field")
    if not path:
        return InvalidRequest(f"the body must be a JSON object: {words}", code="invalid_json")
    return InvalidRequest(f"{path}: {words[:1].lower()}{words[1:]}", param=path)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
