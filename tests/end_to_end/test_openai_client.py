"""The official client against a real server: default base, demo adapters."""

import asyncio
from pathlib import Path

import httpx
import openai
import pytest

from tests.end_to_end.serving import serving
from tests.waiting import eventually

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"
BASE = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("openai")
    adapters = [f"--adapter={name}={EXAMPLES / name}" for name in ("json", "pirate")]
    # In bf16 a product rounds by its number of rows; these tests compare across batches.
    adapters.append("--dtype=fp32")
    with serving(*adapters, state_dir=root / "state", log=root / "serve.log") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def free_blocks(server) -> tuple[int, int]:
    """Free and all KV blocks of the only worker."""
    with server.client() as http:
        status = http.get("/v1/workers").json()["data"][0]["status"]
    return status["num_free_blocks"], status["num_blocks"]


def test_chat_answers_under_the_model_name_that_was_asked(client):
    answer = client.chat.completions.create(
        model=f"{BASE}:pirate", messages=QUESTION, max_tokens=24, temperature=0
    )

    assert answer.model == f"{BASE}:pirate"
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage.completion_tokens <= 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_base_and_adapters_answer_differently(client):
    texts = {
        client.chat.completions.create(model=model, messages=QUESTION, max_tokens=24, temperature=0)
        .choices[0]
        .message.content
        for model in (BASE, f"{BASE}:pirate", f"{BASE}:json")
    }

    assert len(texts) == 3


def test_header_says_which_version_ran(client):
    versions = {}
    for model in (BASE, f"{BASE}:pirate"):
        raw = client.chat.completions.with_raw_response.create(
            model=model, messages=QUESTION, max_tokens=2
        )
        versions[model] = raw.headers["x-loraplex-version"]

    assert versions[BASE] == "base"
    assert versions[f"{BASE}:pirate"].startswith("sha256:")


def test_stream_says_what_the_whole_answer_says(client):
    request = {
        "model": f"{BASE}:pirate",
        "messages": QUESTION,
        "max_tokens": 32,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**request)
    chunks = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.model == f"{BASE}:pirate" for chunk in chunks)


def test_stream_without_include_usage_has_no_usage(client):
    chunks = list(
        client.chat.completions.create(model=BASE, messages=QUESTION, max_tokens=4, stream=True)
    )

    assert all(chunk.usage is None for chunk in chunks)
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_completions_take_text_and_token_ids(client, server):
    text = "The capital of France is"
    with server.client() as http:
        token_ids = http.post("/tokenize", json={"model": BASE, "prompt": text}).json()["tokens"]

    answers = [
        client.completions.create(model=BASE, prompt=prompt, max_tokens=8, temperature=0)
        for prompt in (text, token_ids)
    ]

    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[0].usage.prompt_tokens == len(token_ids)


def test_several_prompts_get_choices_by_index(client):
    prompts = ["One, two,", "The sky is"]
    both = client.completions.create(model=BASE, prompt=prompts, max_tokens=6, temperature=0)
    alone = [
        client.completions.create(model=BASE, prompt=prompt, max_tokens=6, temperature=0)
        for prompt in prompts
    ]

    assert [choice.index for choice in both.choices] == [0, 1]
    assert [c.text for c in both.choices] == [answer.choices[0].text for answer in alone]


def test_stop_string_ends_the_text_before_it(client):
    request = {"model": BASE, "prompt": "1, 2, 3, 4, 5, 6,", "max_tokens": 40, "temperature": 0}
    free = client.completions.create(**request).choices[0].text
    stop = free[10:14]
    stopped = client.completions.create(**request, stop=[stop]).choices[0]

    assert stopped.finish_reason == "stop"
    assert stopped.text == free[: free.index(stop)]


def test_seed_makes_sampling_repeatable(client):
    def sample(seed):
        answer = client.chat.completions.create(
            model=BASE, messages=QUESTION, max_tokens=24, temperature=1.5, seed=seed
        )
        return answer.choices[0].message.content

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)


def test_samples_of_a_seed_differ_and_repeat(client):
    request = {
        "model": BASE,
        "messages": QUESTION,
        "max_tokens": 16,
        "temperature": 1.2,
        "seed": 7,
        "n": 4,
    }
    first, again = (client.chat.completions.create(**request) for _ in range(2))
    chunks = list(client.chat.completions.create(**request, stream=True))

    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert [choice.message.content for choice in again.choices] == texts
    streamed = ["", "", "", ""]
    for chunk in chunks:
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert first.usage.completion_tokens <= 64
    one = client.chat.completions.create(**{**request, "n": 1})
    assert one.choices[0].message.content == texts[0], "sample 0 is what one alone would be"
    assert one.usage.prompt_tokens == first.usage.prompt_tokens


def test_logit_bias_forces_and_forbids_tokens(client, server):
    request = {"model": BASE, "prompt": "The capital of France is", "temperature": 0}
    free = client.completions.create(**request, max_tokens=1).choices[0].text
    with server.client() as http:
        forced, forbidden = (
            http.post(
                "/tokenize", json={"model": BASE, "prompt": text, "add_special_tokens": False}
            ).json()["tokens"][0]
            for text in (" blue", free)
        )

    blue = client.completions.create(**request, max_tokens=3, logit_bias={str(forced): 100})
    other = client.completions.create(**request, max_tokens=1, logit_bias={str(forbidden): -100})

    assert blue.choices[0].text == " blue blue blue"
    assert other.choices[0].text != free


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 2.0}, {"extra_body": {"repetition_penalty": 1.8}}]
)
def test_penalties_end_a_loop(client, penalty):
    """What a greedy answer repeats for ever comes less often when it is penalised."""
    request = {"model": BASE, "prompt": "ha ha ha ha ha ha ha ha", "max_tokens": 24}
    free, penalised = (
        client.completions.create(**request, temperature=0, **fields).choices[0].text.split()
        for fields in ({}, penalty)
    )

    assert free.count("ha") > 15
    assert penalised.count("ha") < free.count("ha") // 2


def test_min_tokens_put_the_end_off(client, server):
    with server.client() as http:
        (comma,) = http.post("/tokenize", json={"prompt": ","}).json()["tokens"]
    request = {"model": BASE, "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 12}
    stop = {"stop_token_ids": [comma]}

    short = client.completions.create(**request, extra_body=stop)
    long = client.completions.create(**request, extra_body={**stop, "min_tokens": 8})

    assert short.choices[0].finish_reason == "stop"
    assert short.usage.completion_tokens < 8 <= long.usage.completion_tokens


def test_echo_repeats_the_prompt_with_its_logprobs(client):
    prompt = "The capital of France is"
    request = {"model": f"{BASE}:pirate", "prompt": prompt, "temperature": 0, "max_tokens": 4}
    plain = client.completions.create(**request)
    answer = client.completions.create(**request, echo=True, logprobs=2)
    (choice,) = answer.choices

    assert choice.text == prompt + plain.choices[0].text
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    assert len(logprobs.tokens) == answer.usage.total_tokens
    assert "".join(logprobs.tokens) == choice.text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text.startswith(token, offset)
    alone = client.completions.create(**{**request, "max_tokens": 0}, echo=True, logprobs=2)
    assert alone.choices[0].text == prompt
    assert alone.choices[0].logprobs.tokens == logprobs.tokens[: answer.usage.prompt_tokens]


def test_samples_of_several_prompts_are_echoed_in_order(client):
    prompts = ["One, two,", "The sky is"]
    answer = client.completions.create(
        model=BASE, prompt=prompts, max_tokens=4, n=2, echo=True, seed=3
    )

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert choice.text.startswith(prompts[choice.index // 2])


def test_repeated_prompt_is_counted_as_cached(client):
    request = {"model": BASE, "prompt": "word " * 200, "max_tokens": 1}
    client.completions.create(**request)

    usage = client.completions.create(**request).usage

    assert usage.prompt_tokens_details.cached_tokens > 150
    assert usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_logprobs_of_greedy_tokens_are_the_top_ones(client):
    answer = client.chat.completions.create(
        model=BASE, messages=QUESTION, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )

    entries = answer.choices[0].logprobs.content
    assert len(entries) == 5
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0


def test_models_lists_base_first_then_adapters(client):
    models = list(client.models.list())

    assert [model.id for model in models] == [BASE, f"{BASE}:json", f"{BASE}:pirate"]
    assert models[1].parent == BASE
    assert models[1].root.startswith("sha256:")


def test_unknown_adapter_is_not_found_and_never_the_base(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model=f"{BASE}:pirat", messages=QUESTION)

    assert caught.value.code == "model_not_found"
    assert "pirate" in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "json_object"}),
        ("temperature", 3.5),
        ("top_p", 0),
        ("max_tokens", "many"),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"49152": 1}),
        ("n", 17),
        ("presence_penalty", 2.5),
        ("repetition_penalty", 0),
        ("min_p", 2),
        ("min_tokens", 10_000),
        ("echo", True),
        ("cache_salt", "mine"),
        ("colour", "red"),
    ],
)
def test_bad_field_is_named(client, field, value):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=BASE, messages=QUESTION, extra_body={field: value})

    assert caught.value.param == field


def test_too_long_prompt_names_both_numbers(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=BASE, prompt=[5] * 8200, max_tokens=4)

    assert caught.value.code == "context_length_exceeded"
    assert "8192" in caught.value.message
    assert "8200" in caught.value.message


def test_bad_json_is_a_bad_request(server):
    with server.client() as http:
        answer = http.post("/v1/chat/completions", content=b'{"model": ')

    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_cancelled_stream_gives_its_blocks_back(client, server):
    stream = client.chat.completions.create(
        model=f"{BASE}:pirate",
        messages=QUESTION,
        max_tokens=4000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _ in range(3):
        next(stream)
    free, total = free_blocks(server)
    assert free < total

    stream.close()

    eventually(lambda: free_blocks(server)[0] == total)


def test_cancelled_whole_answer_gives_its_blocks_back(server):
    """A client that leaves before an unstreamed answer ends it too."""
    body = {"model": BASE, "prompt": "Hello", "max_tokens": 4000, "ignore_eos": True}
    with server.client() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=1.5)

    eventually(lambda: len(set(free_blocks(server))) == 1)


def test_async_client_mixes_streams_of_all_adapters(server):
    models = [BASE, f"{BASE}:pirate", f"{BASE}:json"] * 4

    async def one(client, model):
        stream = await client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=16, temperature=0, stream=True
        )
        parts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
        return "".join(parts)

    async def everything():
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, model) for model in models))

    texts = asyncio.run(everything())

    assert texts[:3] * 4 == texts
    assert len(set(texts)) == 3
