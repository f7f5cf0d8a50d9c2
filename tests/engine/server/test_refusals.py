"""What bad input gets: a status, a code, and the name of the field."""

from typing import Any

import pytest

from tests.engine.server.conftest import RunningWorker

pytestmark = pytest.mark.anyio

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]


async def refused(
    running: RunningWorker, path: str, body: object, *, status: int = 400
) -> dict[str, Any]:
    response = await running.post(path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": "much"}}, "logit_bias"),
        ({"logit_bias": {"one": 2}}, "logit_bias"),
        ({"logit_bias": {"-1": 2}}, "logit_bias"),
        ({"logit_bias": {"600": 2}}, "logit_bias"),
        ({"logit_bias": {str(n): 0 for n in range(1025)}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"cache_salt": "mine"}, "cache_salt"),
        ({"priority": -5}, "priority"),
        ({"echo": True}, "echo"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [600]}, "stop_token_ids"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"model": 7}, "model"),
        ({"model": ""}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
async def test_bad_chat_field_is_named(running: RunningWorker, fields, param):
    error = await refused(running, "/v1/chat/completions", {**CHAT, **fields})
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": 1}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"prompt": ["a"] * 17, "n": 16}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_completion_tokens": 1}, "max_completion_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [600]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": None}, "prompt"),
    ],
)
async def test_bad_completion_field_is_named(running: RunningWorker, fields, param):
    error = await refused(running, "/v1/completions", {**TEXT, **fields})
    assert error["param"] == param


async def test_missing_field_is_named(running: RunningWorker):
    error = await refused(running, "/v1/chat/completions", {"model": "tiny"})
    assert (error["param"], error["code"]) == ("messages", "missing_field")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'{"model": "tiny"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model":"\\ud800"}',
    ],
)
async def test_what_is_no_json_object_is_refused(running: RunningWorker, raw):
    response = await running.client.post("/v1/chat/completions", content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("text", ['"\\udc00"', '"\\ud83d\\ud83d"', '"\\u0000"'])
async def test_odd_characters_do_no_harm(running: RunningWorker, text):
    raw = f'{{"model": "tiny", "prompt": {text}}}'.encode()
    response = await running.client.post("/v1/completions", content=raw)
    assert response.status_code in (200, 400), response.text


async def test_large_body_is_refused(running: RunningWorker, monkeypatch):
    monkeypatch.setattr("engine.server.parsing.MAX_BODY_BYTES", 1000)
    error = await refused(running, "/v1/completions", {**TEXT, "user": "x" * 2000}, status=413)
    assert error["code"] == "request_too_large"


async def test_long_prompt_is_refused_with_both_numbers(running: RunningWorker):
    body = {"model": "tiny", "prompt": [5] * 200}
    error = await refused(running, "/v1/completions", body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "200" in error["message"]
    assert "128" in error["message"]
    long = [{"role": "user", "content": "word " * 300}]
    error = await refused(running, "/v1/chat/completions", {"model": "tiny", "messages": long})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_max_tokens_that_does_not_fit_is_refused(running: RunningWorker):
    body = {"model": "tiny", "prompt": [5] * 100, "max_tokens": 29}
    error = await refused(running, "/v1/completions", body)
    assert error["code"] == "context_length_exceeded"
    response = await running.post("/v1/completions", {**body, "max_tokens": 28})
    assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_model_is_never_the_base(running: RunningWorker, stream):
    for model in ("tinY", "tiny:pirate", "pirate@0123456789ab"):
        body = {**CHAT, "model": model, "stream": stream}
        error = await refused(running, "/v1/chat/completions", body, status=404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_unknown_routes_and_methods_are_json_errors(running: RunningWorker):
    error = await refused(running, "/v1/nothing", {}, status=404)
    assert error["code"] == "not_found"
    response = await running.client.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"


async def test_accepted_but_unused_fields(running: RunningWorker):
    body = {**CHAT, "user": "u", "metadata": {"a": "b"}, "store": True, "n": 1, "max_tokens": None}
    response = await running.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "headers",
    [
        {"x-loraplex-priority": "high"},
        {"x-loraplex-priority": "1.5"},
        {"x-loraplex-priority": "9" * 7},
        {"x-loraplex-salt": "x" * 257},
        {"x-loraplex-tenant": "x" * 257},
    ],
    ids=str,
)
async def test_bad_header_is_named(running: RunningWorker, headers):
    response = await running.post("/v1/completions", TEXT, **headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in headers
