"""Several samples of several prompts: choices by index, whole and interleaved."""

from typing import Any

import pytest

from engine.protocol import AddRequest, SamplingParams
from engine.server.core_client import CoreClient
from tests.engine.server.conftest import RunningWorker
from tests.engine.server.echo_core import Mishap
from tests.engine.server.test_answers import FOX, chunks_of, complete, stream

pytestmark = pytest.mark.anyio


@pytest.fixture
def arrived(monkeypatch) -> list[AddRequest]:
    """What is handed to the core."""
    requests: list[AddRequest] = []
    submit = CoreClient.submit

    def spy(client: CoreClient, added: list[AddRequest]) -> Any:
        requests.extend(added)
        return submit(client, added)

    monkeypatch.setattr(CoreClient, "submit", spy)
    return requests


def texts_by_index(chunks: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def test_samples_of_a_prompt_are_choices_in_a_row(running: RunningWorker, tokenizer):
    prompts = [FOX, "one two three four"]
    ids = [tokenizer.encode_now(prompt, add_special_tokens=False) for prompt in prompts]
    answer = await complete(running, prompt=ids, n=3)
    expected = [tokenizer.decode(prompt[k:]) for prompt in ids for k in range(3)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))


async def test_streamed_samples_keep_their_indexes(running: RunningWorker):
    fields = {"prompt": [FOX, "one two three four"], "n": 3, "logprobs": 1}
    whole = await complete(running, **fields)
    chunks = await stream(running, **fields, stream_options={"include_usage": True})
    texts = texts_by_index(chunks)
    assert [texts[index] for index in range(6)] == [c["text"] for c in whole["choices"]]
    order = [chunk["choices"][0]["index"] for chunk in chunks[:-1]]
    assert order[:6] == [0, 1, 2, 3, 4, 5], "the samples come side by side"
    assert chunks[-1]["usage"] == whole["usage"]


async def test_samples_of_a_chat(running: RunningWorker):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}], "n": 2}
    whole = (await running.post("/v1/chat/completions", body)).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert texts == ["user\nhello there\nassistant\n"] * 2, "the first token left out is special"
    streamed = await running.post("/v1/chat/completions", {**body, "stream": True})
    joined = ["", ""]
    roles = []
    for chunk in chunks_of(streamed.text):
        (choice,) = chunk["choices"]
        joined[choice["index"]] += choice["delta"].get("content", "")
        roles += [choice["index"]] if "role" in choice["delta"] else []
    assert joined == texts
    assert roles == [0, 1]


async def test_a_prompt_counts_once_and_its_samples_each(running: RunningWorker, tokenizer):
    num_ids = len(tokenizer.encode_now(FOX, add_special_tokens=False))
    usage = (await complete(running, n=4))["usage"]
    assert usage["prompt_tokens"] == num_ids
    assert usage["completion_tokens"] == sum(num_ids + 1 - k for k in range(4))
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_cached_tokens_are_never_more_than_the_prompt(running: RunningWorker):
    usage = (await complete(running, prompt=[[5], [6, 7]], n=2))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert usage["prompt_tokens"] == 3


async def test_a_stop_string_ends_one_sample_and_not_the_others(running: RunningWorker):
    answer = await complete(running, prompt="STOP one two STOP three", stop="STOP", n=8)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[0] == ""
    assert any(text.strip() == "one two" for text in texts)
    await running.wait_until_idle()


async def test_endless_samples_end_when_the_last_has_met_its_stop(running: RunningWorker):
    answer = await complete(running, stop=["jumps"], seed=Mishap.ENDLESS, n=3)
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop"] * 3
    await running.wait_until_idle()


async def test_an_error_in_one_sample_ends_the_request(running: RunningWorker):
    body = {"model": "tiny", "prompt": FOX, "n": 3, "seed": Mishap.ERROR_AFTER_TWO_TOKENS}
    response = await running.post("/v1/completions", body)
    assert response.status_code == 500
    await running.wait_until_idle()


async def test_every_sampling_field_reaches_the_core(running: RunningWorker, arrived):
    fields = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "seed": 77,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "n": 2,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 2.0,
        "min_tokens": 3,
    }
    await complete(running, **fields, logprobs=2, echo=True, logit_bias={"5": -100, "6": 1.5})
    fields["stop_token_ids"] = (9,)
    assert arrived[0].params == SamplingParams(
        **fields, logit_bias={5: -100.0, 6: 1.5}, num_logprobs=2, num_prompt_logprobs=2
    )


async def test_left_out_fields_change_nothing(running: RunningWorker, arrived):
    await complete(running)
    assert arrived[0].params == SamplingParams(max_tokens=60)
    nothing = dict.fromkeys(("n", "min_p", "logit_bias", "min_tokens", "repetition_penalty"))
    await complete(running, **nothing)
    assert arrived[1].params == arrived[0].params


async def test_gateway_s_headers_reach_the_core(running: RunningWorker, arrived):
    headers = {
        "x-loraplex-salt": "of a tenant",
        "x-loraplex-tenant": "acme",
        "x-loraplex-priority": "-2",
    }
    body = {"model": "tiny", "prompt": ["a", "b"]}
    await running.post("/v1/completions", body, **headers)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    await running.post("/v1/chat/completions", chat, **headers)
    assert {(r.cache_salt, r.tenant, r.priority) for r in arrived} == {("of a tenant", "acme", -2)}
    assert len(arrived) == 3
    await running.post("/v1/completions", body)
    assert (arrived[3].cache_salt, arrived[3].tenant, arrived[3].priority) == ("", "", 0)


async def test_no_stop_string_ends_an_answer_that_is_too_short(running: RunningWorker, tokenizer):
    prompt = "STOP one two STOP three"
    ids = tokenizer.encode_now(prompt, add_special_tokens=False)
    until_second = tokenizer.encode_now("STOP one", add_special_tokens=False)
    fields = {"prompt": ids, "stop": "STOP"}
    assert (await complete(running, **fields))["choices"][0]["text"] == ""
    answer = await complete(running, **fields, min_tokens=len(until_second))
    assert answer["choices"][0]["text"] == "STOP one two "
    answer = await complete(running, **fields, min_tokens=len(ids))
    assert answer["choices"][0]["text"] == prompt
