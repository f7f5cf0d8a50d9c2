"""Whole and streamed answers of both endpoints."""

import json

import pytest

from tests.engine.server.conftest import RunningWorker

pytestmark = pytest.mark.anyio


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


async def test_completion_is_the_text_of_the_tokens(running: RunningWorker):
    body = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 50}
    response = await running.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["choices"] == [
        {"index": 0, "text": "the quick brown fox", "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_streamed_chat_equals_the_whole(running: RunningWorker):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "grüße 你好 🙂"}]}
    whole = (await running.post("/v1/chat/completions", body)).json()
    streamed = await running.post("/v1/chat/completions", {**body, "stream": True})
    *chunks, done = events(streamed.text)
    assert done == "[DONE]"
    pieces = [json.loads(chunk)["choices"][0] for chunk in chunks]
    text = "".join(piece["delta"].get("content", "") for piece in pieces)
    assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
    assert text == whole["choices"][0]["message"]["content"] == "user\ngrüße 你好 🙂\nassistant\n"
    assert pieces[-1]["finish_reason"] == "stop"
