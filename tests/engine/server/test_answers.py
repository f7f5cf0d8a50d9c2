"""Whole and streamed answers of both endpoints, token by token."""

import json
from typing import Any

import pytest

from tests.engine.server.conftest import RunningWorker
from tests.engine.server.echo_core import Mishap

pytestmark = pytest.mark.anyio

FOX = "the quick brown fox jumps"


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The JSON of each event; the last one must be [DONE]."""
    *chunks, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


async def complete(running: RunningWorker, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": FOX, "max_tokens": 60, **fields}
    response = await running.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(running: RunningWorker, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "prompt": FOX, "max_tokens": 60, "stream": True, **fields}
    response = await running.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return chunks_of(response.text)


async def test_completion_is_the_text_of_the_tokens(running: RunningWorker):
    answer = await complete(running)
    assert answer["choices"] == [
        {"index": 0, "text": FOX, "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert answer["usage"]["completion_tokens"] == answer["usage"]["prompt_tokens"] + 1


async def test_completions_are_16_tokens_long_by_default(running: RunningWorker):
    body = {"model": "tiny", "prompt": [5] * 40}
    answer = (await running.post("/v1/completions", body)).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_streamed_chat_equals_the_whole(running: RunningWorker):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "grüße 你好 🙂"}]}
    whole = (await running.post("/v1/chat/completions", body)).json()
    streamed = await running.post("/v1/chat/completions", {**body, "stream": True})
    pieces = [chunk["choices"][0] for chunk in chunks_of(streamed.text)]
    text = "".join(piece["delta"].get("content", "") for piece in pieces)
    assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
    assert text == whole["choices"][0]["message"]["content"] == "user\ngrüße 你好 🙂\nassistant\n"
    assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1]["finish_reason"] == "stop"


async def test_chat_fills_the_context_by_default(running: RunningWorker):
    messages = [{"role": "user", "content": "x"}]
    body = {"model": "tiny", "messages": messages, "seed": Mishap.ENDLESS, "stream": True}
    tokenized = await running.post("/tokenize", {"messages": messages})
    async with running.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
    assert tokenized.json()["max_model_len"] == 128


async def test_content_may_be_a_list_of_texts(running: RunningWorker):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
    answer = (await running.post("/v1/chat/completions", body)).json()
    assert answer["choices"][0]["message"]["content"] == "user\none\ntwo\nassistant\n"


async def test_several_prompts_are_several_choices(running: RunningWorker):
    prompts = ["one two", "three four five six", "seven"]
    answer = await complete(running, prompt=prompts)
    assert [choice["text"] for choice in answer["choices"]] == prompts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    chunks = await stream(running, prompt=prompts, stream_options={"include_usage": True})
    texts = ["", "", ""]
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == prompts
    assert chunks[-1]["usage"] == answer["usage"]


async def test_prompts_may_be_token_ids(running: RunningWorker, tokenizer):
    ids = tokenizer.encode_now(FOX, add_special_tokens=False)
    assert (await complete(running, prompt=ids))["choices"][0]["text"] == FOX
    answer = await complete(running, prompt=[ids, ids[:2]])
    assert answer["choices"][1]["text"] == tokenizer.decode(ids[:2])


@pytest.mark.parametrize("seed", [None, Mishap.TWO_TOKENS_A_STEP])
async def test_stop_string_ends_the_text_before_it(running: RunningWorker, seed):
    prompt = FOX + " STOP here and more and more words"
    for stop in ("STOP", ["nothing", " STOP here"], ["here", "STOP"]):
        first = stop if isinstance(stop, str) else min(stop, key=(prompt + stop[0] * 9).find)
        expected = prompt[: prompt.find(first)]
        answer = await complete(running, prompt=prompt, stop=stop, seed=seed)
        assert answer["choices"][0]["text"] == expected
        assert answer["choices"][0]["finish_reason"] == "stop"
        chunks = await stream(running, prompt=prompt, stop=stop, seed=seed)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    await running.wait_until_idle()


async def test_stop_string_ends_the_work_of_the_core(running: RunningWorker):
    answer = await complete(running, stop=["jumps"], seed=Mishap.ENDLESS)
    assert answer["choices"][0]["text"] == "the quick brown fox "
    await running.wait_until_idle()


async def test_held_back_text_comes_at_the_end(running: RunningWorker):
    answer = await complete(running, stop="jumps over")
    assert answer["choices"][0]["text"] == FOX


async def test_stop_token_is_counted_and_scored_but_not_shown(running: RunningWorker, tokenizer):
    ids = tokenizer.encode_now(FOX, add_special_tokens=False)
    answer = await complete(running, stop_token_ids=[ids[3]], logprobs=0)
    choice = answer["choices"][0]
    assert choice["text"] == tokenizer.decode(ids[:3])
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 4
    assert len(choice["logprobs"]["tokens"]) == 4
    assert choice["logprobs"]["text_offset"][-1] == len(choice["text"])


async def test_usage_is_null_until_the_last_chunk(running: RunningWorker):
    *chunks, last = await stream(running, stream_options={"include_usage": True})
    assert {str(chunk["usage"]) for chunk in chunks} == {"None"}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(chunks)
    assert "usage" not in (await stream(running))[-1]


async def test_running_usage_counts_up(running: RunningWorker):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(running, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [*range(1, len(chunks)), len(chunks) - 1]


async def test_public_model_name_is_echoed(running: RunningWorker):
    body = {"model": "tiny", "prompt": "one"}
    headers = {"x-loraplex-model": "tiny:pirate"}
    response = await running.post("/v1/completions", body, **headers)
    assert response.json()["model"] == "tiny:pirate"
    assert response.headers["x-loraplex-instance"] == running.worker.supervisor.instance
    assert (await running.post("/v1/completions", body)).json()["model"] == "tiny"


async def test_silent_stream_is_kept_alive(running: RunningWorker, monkeypatch):
    monkeypatch.setattr("engine.server.respond.PING_AFTER_S", 0.05)
    body = {"model": "tiny", "prompt": "x", "stream": True, "seed": Mishap.SILENCE}
    async with running.client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line:
                assert line == ": ping"
                break
    await running.wait_until_idle()


async def test_a_returned_answer_may_be_sent_back(running: RunningWorker):
    """Clients keep answers with their empty fields and send them again."""
    kept = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None}
    body = {"model": "tiny", "messages": [kept, {"role": "user", "content": "go", "name": "me"}]}
    response = await running.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
