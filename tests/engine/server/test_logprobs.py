"""Logprobs in both of OpenAI's shapes."""

import json

import pytest

from tests.engine.server.conftest import RunningWorker
from tests.engine.server.test_answers import chunks_of, complete, stream
from tests.engine.server.tiny_model import END

pytestmark = pytest.mark.anyio

SMILE = "go 🙂 on"


async def test_completion_logprobs_are_four_equal_lists(running: RunningWorker, tokenizer):
    answer = await complete(running, prompt=SMILE, logprobs=2)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    ids = tokenizer.encode_now(SMILE, add_special_tokens=False)
    assert {len(values) for values in logprobs.values()} == {len(ids) + 1}
    assert logprobs["token_logprobs"] == [-0.5] * (len(ids) + 1)
    assert logprobs["tokens"][-1] == END
    assert all(
        token in top
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    )
    assert logprobs["tokens"][0] == tokenizer.decode(ids[:1])
    assert any(token.startswith("bytes:\\x") for token in logprobs["tokens"])


async def test_text_offset_is_where_a_token_begins(running: RunningWorker, tokenizer):
    logprobs = (await complete(running, prompt=SMILE, logprobs=0))["choices"][0]["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:") and token != END:
            assert SMILE[offset:].startswith(token)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


async def test_streamed_logprobs_join_to_the_whole(running: RunningWorker):
    fields = {"prompt": "one two STOP three", "stop": [" two three"], "logprobs": 1}
    whole = (await complete(running, **fields))["choices"][0]["logprobs"]
    joined: dict[str, list[object]] = {name: [] for name in whole}
    for chunk in await stream(running, **fields):
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == whole


async def test_tokens_behind_a_stop_string_are_not_scored(running: RunningWorker):
    answer = await complete(running, prompt="one two STOP three", stop="STOP", logprobs=0)
    choice = answer["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]).strip() == choice["text"].strip() == "one two"


async def test_chat_logprobs_have_bytes(running: RunningWorker):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": SMILE}],
        "logprobs": True,
        "top_logprobs": 3,
    }
    choice = (await running.post("/v1/chat/completions", body)).json()["choices"][0]
    content = choice["logprobs"]["content"]
    special = ("<|im_start|>", "<|im_end|>")
    raw = [bytes(entry["bytes"]) for entry in content if entry["token"] not in special]
    assert b"".join(raw).decode() == choice["message"]["content"]
    assert {len(entry["top_logprobs"]) for entry in content} == {3}
    streamed = await running.post("/v1/chat/completions", {**body, "stream": True})
    chunks = [chunk["choices"][0] for chunk in chunks_of(streamed.text)]
    pieces = [entry for chunk in chunks for entry in (chunk["logprobs"] or {}).get("content", [])]
    assert pieces == content
    assert json.dumps(content).isascii()
