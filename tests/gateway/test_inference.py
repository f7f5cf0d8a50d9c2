"""A request from a client to a worker and back."""

import asyncio
import json

import httpx
import pytest

from tests.gateway.scripted_worker import USAGE, Refusal, Script, ScriptedWorker
from tests.gateway.serving import closed_port
from tests.gateway.world import gateway_world

pytestmark = pytest.mark.anyio


def events_of(text: str) -> list:
    """The data events of a stream, decoded; the last one stays text."""
    found = [part[6:] for part in text.split("\n\n") if part.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in found]


async def test_base_runs_without_any_load(world):
    answer = await world.complete("tiny")

    assert answer.status_code == 200
    assert answer.headers["x-loraplex-version"] == "base"
    assert answer.headers["x-loraplex-worker"] == "w-1"
    assert "x-loraplex-registry" not in answer.headers
    assert world.worker.paths() == ["/v1/completions"]
    assert world.worker.sent[0].body["model"] == "tiny"


async def test_adapter_is_loaded_from_the_store_and_named_as_asked(world, peft_adapters):
    digest = (await world.push("pirate", peft_adapters["pirate"])).json()["digest"]
    lora_id = f"pirate@{digest[7:19]}"

    for model in ("tiny:pirate", "pirate", "tiny:pirate@v1", "tiny:pirate@default"):
        answer = await world.complete(model)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        assert answer.headers["x-loraplex-version"] == digest

    assert world.worker.loaded == {lora_id: str(world.store_dir / "versions" / digest[7:])}
    assert world.worker.paths().count("/v1/load_lora_adapter") == 1
    assert {s.body.get("model", lora_id) for s in world.worker.sent} == {lora_id}


async def test_requests_that_need_one_version_share_its_load(world, peft_adapters):
    await world.push_cold("pirate", peft_adapters["pirate"])
    world.worker.load_gate = asyncio.Event()

    requests = [asyncio.create_task(world.complete("pirate")) for _ in range(5)]
    await world.worker.load_begun.wait()
    world.worker.load_gate.set()
    answers = await asyncio.gather(*requests)

    assert [answer.status_code for answer in answers] == [200] * 5
    assert world.worker.paths().count("/v1/load_lora_adapter") == 1


async def test_client_that_leaves_during_a_load_leaves_it_to_the_others(world, peft_adapters):
    await world.push_cold("pirate", peft_adapters["pirate"])
    world.worker.load_gate = asyncio.Event()

    first = asyncio.create_task(world.complete("pirate"))
    await world.worker.load_begun.wait()
    second = asyncio.create_task(world.complete("pirate"))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    world.worker.load_gate.set()

    assert (await second).status_code == 200
    assert world.worker.paths().count("/v1/load_lora_adapter") == 1


async def test_worker_that_forgot_an_adapter_is_given_it_again(world, peft_adapters):
    await world.push("pirate", peft_adapters["pirate"])
    await world.complete("pirate")
    world.worker.forget_everything()

    answer = await world.complete("pirate")

    assert answer.status_code == 200
    assert world.worker.paths().count("/v1/load_lora_adapter") == 2


async def test_refused_load_is_told_without_the_store_s_path(world, peft_adapters):
    await world.push_cold("pirate", peft_adapters["pirate"])
    world.worker.load_refusal = Refusal(422, "invalid_adapter")

    answer = await world.complete("pirate")

    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == "bad: the adapter's directory"
    world.worker.load_refusal = Refusal(400, "invalid_request")
    answer = await world.complete("pirate")
    assert answer.status_code == 502
    assert str(world.store_dir) not in answer.text


@pytest.mark.parametrize(
    "model",
    ["tiny:pirat", "pirat", "tiny:pirate@v9", "tiny:pirate@nope", "tiny:", "other", "other:pirate"],
)
async def test_unknown_model_is_never_the_base(world, peft_adapters, model):
    await world.push_cold("pirate", peft_adapters["pirate"])

    answer = await world.complete(model)

    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert world.worker.sent == []


async def test_near_names_are_offered(world, peft_adapters):
    await world.push("pirate", peft_adapters["pirate"])

    answer = await world.complete("tiny:pirat")

    assert "did you mean 'tiny:pirate'?" in answer.json()["error"]["message"]


async def test_request_keeps_its_version_while_the_alias_moves(world, peft_adapters):
    first = (await world.push("pirate", peft_adapters["pirate"])).json()["digest"]
    gate = asyncio.Event()
    world.worker.next.append(Script(gate=gate))
    body = {"model": "pirate", "prompt": "Hello", "stream": True}

    async with world.http.stream("POST", "/v1/completions", json=body) as stream:
        second = await world.push("pirate", peft_adapters["json"], promote="true")
        gate.set()
        text = (await stream.aread()).decode()

    assert stream.headers["x-loraplex-version"] == first
    assert events_of(text)[-1] == "[DONE]"
    after = await world.complete("pirate")
    assert after.headers["x-loraplex-version"] == second.json()["digest"] != first


async def test_stream_hides_the_usage_that_nobody_asked_for(world):
    answer = await world.complete("tiny", stream=True)

    events = events_of(answer.text)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["Ahoy", " matey"]
    assert events[-1] == "[DONE]"
    assert world.worker.sent[0].body["stream_options"] == {"include_usage": True}
    metrics = (await world.http.get("/metrics")).text
    assert 'loraplex_tokens_total{kind="completion"} 2.0' in metrics


async def test_stream_shows_the_usage_to_a_client_who_asked(world):
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await world.complete("tiny", stream=True, stream_options=options)

    assert events_of(answer.text)[-2] == {"model": "tiny", "choices": [], "usage": USAGE}
    assert world.worker.sent[0].body["stream_options"] == options


async def test_bookkeeping_fields_are_taken_and_go_no_further(world):
    answer = await world.complete("tiny", user="u", metadata={"a": "b"}, store=True)

    assert answer.status_code == 200
    assert world.worker.sent[0].body == {"model": "tiny", "prompt": "Hello"}


async def test_stream_that_breaks_ends_with_an_error_event(world):
    world.worker.next.append(Script(breaks=True))

    answer = await world.complete("tiny", stream=True)

    events = events_of(answer.text)
    assert answer.status_code == 200
    assert events[0]["choices"][0]["text"] == "Ahoy"
    assert events[-2]["error"]["code"] == "stream_broken"
    assert events[-1] == "[DONE]"


async def test_client_that_leaves_a_stream_closes_it_at_the_worker(world):
    script = Script(gate=asyncio.Event())
    world.worker.next.append(script)
    body = {"model": "tiny", "prompt": "Hello", "stream": True}

    async with world.http.stream("POST", "/v1/completions", json=body) as stream:
        await anext(stream.aiter_bytes())

    async with asyncio.timeout(5):
        await script.closed.wait()


async def test_client_that_leaves_a_whole_answer_closes_it_at_the_worker(world):
    script = Script(gate=asyncio.Event())
    world.worker.next.append(script)

    with pytest.raises(httpx.ReadTimeout):
        await world.http.post(
            "/v1/completions", json={"model": "tiny", "prompt": "Hello"}, timeout=0.3
        )

    async with asyncio.timeout(5):
        await script.closed.wait()


async def test_tokenize_asks_a_worker_for_the_base(world, peft_adapters):
    await world.push_cold("pirate", peft_adapters["pirate"])

    answer = await world.http.post("/tokenize", json={"model": "tiny:pirate", "prompt": "Hi"})

    assert answer.json()["tokens"] == [1, 2]
    assert world.worker.sent[0].body == {"model": "tiny", "prompt": "Hi"}


async def test_detokenize_and_tokenizer_info_are_the_base_s(world, peft_adapters):
    await world.push("pirate", peft_adapters["pirate"])
    world.worker.sent.clear()

    text = await world.http.post("/detokenize", json={"model": "tiny:pirate", "tokens": [1, 2]})
    info = await world.http.get("/tokenizer_info", params={"model": "tiny:pirate"})

    assert text.json() == {"prompt": "Hi"}
    assert info.json() == {"tokenizer_class": "T", "eos_token": "</s>"}
    assert [sent.body for sent in world.worker.sent] == [{"model": "tiny", "tokens": [1, 2]}, {}]
    unknown = await world.http.get("/tokenizer_info", params={"model": "other"})
    assert unknown.status_code == 404


async def test_one_base_needs_no_name_where_only_its_tokenizer_is_asked(world):
    """As lm-eval and vLLM's other clients ask."""
    for method, path, body in (
        ("POST", "/tokenize", {"prompt": "Hi", "add_special_tokens": False}),
        ("POST", "/detokenize", {"tokens": [1]}),
        ("GET", "/tokenizer_info", None),
    ):
        answer = await world.http.request(method, path, json=body)
        assert answer.status_code == 200, answer.text
    assert [sent.body.get("model") for sent in world.worker.sent] == ["tiny", "tiny", None]


async def test_two_bases_need_a_name(world):
    other = ScriptedWorker("w-2", base_id="other")
    await world.beat(other, address=closed_port())

    answer = await world.http.get("/tokenizer_info")

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"
    assert "other, tiny" in answer.json()["error"]["message"]


async def test_no_worker_has_no_tokenizer(world):
    await world.registry.remove_worker("w-1")

    assert (await world.http.get("/tokenizer_info")).status_code == 503


async def test_tenant_and_salt_are_the_gateway_s_and_never_the_client_s(world):
    theirs = {
        "x-loraplex-salt": "stolen",
        "x-loraplex-tenant": "somebody",
        "x-loraplex-priority": "-9",
        "x-loraplex-model": "mine",
    }
    body = {"model": "tiny", "prompt": "Hello"}

    for headers in ({}, theirs):
        await world.http.post("/v1/completions", json=body, headers=headers)
    refused = await world.complete("tiny", cache_salt="stolen")

    seen = [
        {name: value for name, value in sent.headers.items() if name.startswith("x-loraplex")}
        for sent in world.worker.sent
    ]
    expected = {
        "x-loraplex-salt": "tenant:default",
        "x-loraplex-tenant": "default",
        "x-loraplex-model": "tiny",
    }
    assert seen == [expected, expected]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


async def test_worker_s_refusal_is_passed_on_with_its_words(world):
    world.worker.next.append(Refusal(400, "context_length_exceeded"))

    answer = await world.complete("tiny")

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_overload_says_when_to_come_back(world):
    world.worker.next.append(Refusal(429, "overloaded", {"retry-after": "7"}))

    answer = await world.complete("tiny")

    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "7"
    assert answer.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("status", [429, 503])
async def test_refusal_of_one_worker_is_tried_once_on_another(
    status, valkey_url, redis_client, tmp_path
):
    async with gateway_world(valkey_url, tmp_path, num_workers=2) as world:
        first, second = world.workers["w-1"], world.workers["w-2"]
        first.next.append(Refusal(status, "busy"))

        answer = await world.complete("tiny")

        assert answer.status_code == 200
        assert answer.headers["x-loraplex-worker"] == "w-2"
        assert (len(first.sent), len(second.sent)) == (1, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_worker_that_is_gone_is_passed_over(stream, valkey_url, redis_client, tmp_path):
    async with gateway_world(valkey_url, tmp_path, num_workers=2) as world:
        await world.beat(world.workers["w-1"], address=closed_port())

        for _ in range(2):
            answer = await world.complete("tiny", stream=stream)
            assert answer.status_code == 200
            assert answer.headers["x-loraplex-worker"] == "w-2"


async def test_only_worker_is_tried_once_more_when_its_connection_breaks(world):
    world.worker.next.append(Script(words=("Ahoy",), breaks=True))

    answer = await world.complete("tiny", stream=True)

    assert answer.status_code == 200
    assert "matey" in answer.text
    assert world.worker.paths() == ["/v1/completions"] * 2


async def test_only_worker_gone_is_unavailable_with_a_time_to_retry(world):
    await world.beat(world.worker, address=closed_port())

    answer = await world.complete("tiny")

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_worker"
    assert answer.headers["retry-after"] == "1"
    assert "127.0.0.1" not in answer.text


async def test_no_worker_at_all_is_unavailable(world):
    await world.registry.remove_worker("w-1")

    answer = await world.complete("tiny")
    health = await world.http.get("/health")

    assert answer.status_code == 503
    assert (health.status_code, health.json()["workers"]) == (503, 0)


async def test_cluster_token_goes_to_the_workers(valkey_url, redis_client, tmp_path):
    async with gateway_world(valkey_url, tmp_path, token="between us") as world:
        assert (await world.complete("tiny")).status_code == 200


async def test_heartbeat_without_the_token_is_not_believed(valkey_url, redis_client, tmp_path):
    async with gateway_world(valkey_url, tmp_path, token="between us") as world:
        world.token = None
        await world.beat(world.worker)

        assert (await world.complete("tiny")).status_code == 503
