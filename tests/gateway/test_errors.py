"""Every error has an answer."""

import asyncio
import json

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.testclient import TestClient

from adapters import errors as adapter_errors
from gateway import errors
from gateway.errors import ADAPTER_ANSWERS, GatewayError, as_gateway_error, error_response
from gateway.middleware import CatchErrors


def kinds_of(base: type) -> set[type]:
    return set(base.__subclasses__()).union(*(kinds_of(kind) for kind in base.__subclasses__()))


def test_every_error_of_the_adapters_package_has_a_status():
    kinds = {k for k in kinds_of(adapter_errors.AdapterError) if k.__module__ == "adapters.errors"}

    assert kinds == set(ADAPTER_ANSWERS)


@pytest.mark.parametrize("kind", sorted(ADAPTER_ANSWERS, key=lambda kind: kind.__name__))
def test_adapter_error_becomes_an_answer_in_openai_s_shape(kind):
    argument = ["/secret/path"] if kind is adapter_errors.AdapterInvalid else "/secret/path"
    answer = error_response(as_gateway_error(kind(argument)))

    error = json.loads(bytes(answer.body))["error"]
    assert answer.status_code == ADAPTER_ANSWERS[kind]
    assert error["code"] == kind.code
    if answer.status_code >= 500:
        assert "/secret" not in error["message"]


def test_every_error_of_the_gateway_is_in_the_tree_of_its_module():
    kinds = {k for k in kinds_of(GatewayError) if k.__module__ == "gateway.errors"}

    assert all(kind.__name__ in errors.__doc__ for kind in kinds)


def test_busy_answers_tell_when_to_come_back():
    answer = error_response(errors.WorkerUnavailable("later", retry_after_s=0.25))

    assert answer.headers["retry-after"] == "1"
    assert answer.headers["retry-after-ms"] == "250"
    assert answer.headers["x-should-retry"] == "true"


def test_unexpected_error_is_logged_and_says_nothing(caplog):
    async def broken(request: Request):
        await asyncio.sleep(0)
        raise RuntimeError("/secret/path")

    app = Starlette(routes=[Route("/", broken)], middleware=[Middleware(CatchErrors)])

    answer = TestClient(app).get("/")

    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert "/secret/path" in caplog.text
