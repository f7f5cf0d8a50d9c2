"""The OpenAPI document and the page made from it."""

import re

import pytest

from gateway.docs_page import docs_page
from gateway.openapi import openapi_document
from gateway.routes.table import TABLE

DOCUMENT = openapi_document(TABLE, version="1.2.3")


def references(node) -> set[str]:
    if isinstance(node, dict):
        found = {node["$ref"]} if "$ref" in node else set()
        return found.union(*(references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(references(value) for value in node))
    return set()


def test_document_has_every_route_and_nothing_else():
    documented = {
        (method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods
    }

    assert documented == {(spec.method, spec.path) for spec in TABLE}


def test_every_reference_has_its_schema_and_every_schema_is_referred_to():
    names = {ref.removeprefix("#/components/schemas/") for ref in references(DOCUMENT)}

    assert names == set(DOCUMENT["components"]["schemas"])


def test_operation_ids_are_unique():
    ids = [op["operationId"] for methods in DOCUMENT["paths"].values() for op in methods.values()]

    assert len(ids) == len(set(ids))


def test_request_schema_is_the_allow_list():
    schema = DOCUMENT["components"]["schemas"]["ChatCompletionRequest"]

    assert schema["additionalProperties"] is False
    assert "tools" not in schema["properties"]
    assert schema["required"] == ["model", "messages"]


def test_page_shows_every_route_and_type_and_fetches_nothing():
    page = docs_page(DOCUMENT)

    for spec in TABLE:
        assert f"<code>{spec.path}</code>" in page
    for name in DOCUMENT["components"]["schemas"]:
        assert f'id="{name}"' in page
    assert not re.search(r"<script|<link|src=|https?://|@import|url\(", page)
    for target in re.findall(r'href="#([^"]+)"', page):
        assert f'id="{target}"' in page


@pytest.mark.anyio
async def test_document_and_page_are_served_to_everyone(world):
    document = await world.http.get("/openapi.json")
    page = await world.http.get("/docs")

    assert document.json()["openapi"] == "3.1.0"
    assert page.headers["content-type"].startswith("text/html")
