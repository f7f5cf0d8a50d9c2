"""The OpenAPI document, made from the route table and the msgspec types, so it can't be old."""

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from gateway.route_spec import RouteSpec
from gateway.tenancy.keys import Access

_REF = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")

_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "A request that is sent again with its key is answered as the first one was.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}


class ErrorObject(msgspec.Struct, kw_only=True):
    """What went wrong; `problems` lists everything when an adapter is refused."""

    message: str
    type: str
    param: str | None
    code: str
    problems: list[str] = []


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The body of every error."""

    error: ErrorObject


def openapi_document(table: Sequence[RouteSpec], *, version: str) -> dict[str, Any]:
    """Return the document for `table`."""
    types = [ErrorAnswer]
    for spec in table:
        types += [t for t in (spec.request, spec.form, spec.response) if t is not None]
    types = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for spec in table:
        path = _PATH_PARAMETER.sub(r"{\1}", spec.path)
        paths.setdefault(path, {})[spec.method.lower()] = _operation(spec, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Loraplex",
            "version": version,
            "summary": "One base model, thousands of LoRA adapters, one OpenAI-compatible address.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "dataKey": {"type": "http", "scheme": "bearer"},
                "adminKey": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def _operation(spec: RouteSpec, schema_of: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": spec.summary,
        "operationId": spec.endpoint.__name__,
        "security": _security(spec.access),
        "responses": _responses(spec, schema_of),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH_PARAMETER.findall(spec.path)
    ]
    parameters += [
        {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
        for name, text in spec.query.items()
    ]
    if spec.method == "POST" and spec.access is Access.ADMIN:
        parameters.append(_IDEMPOTENCY_KEY)
    if parameters:
        operation["parameters"] = parameters
    content = {}
    if spec.form is not None:
        content["multipart/form-data"] = {"schema": schema_of[spec.form]}
    if spec.request is not None:
        content["application/json"] = {"schema": schema_of[spec.request]}
    if content:
        operation["requestBody"] = {"required": spec.body_required, "content": content}
    return operation


def _responses(spec: RouteSpec, schema_of: dict[Any, Any]) -> dict[str, Any]:
    schema = schema_of[spec.response] if spec.response is not None else {}
    good: dict[str, Any] = {spec.media_type: {"schema": schema}}
    if spec.streams:
        good["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {
        str(status): {"description": HTTPStatus(status).phrase, "content": good}
        for status in spec.statuses
    }
    responses["default"] = {
        "description": "An error in OpenAI's shape",
        "content": {"application/json": {"schema": schema_of[ErrorAnswer]}},
    }
    return responses


def _security(access: Access) -> list[dict[str, list[str]]]:
    if access is Access.PUBLIC:
        return []
    if access is Access.ADMIN:
        return [{"adminKey": []}]
    return [{"dataKey": []}, {"adminKey": []}]
