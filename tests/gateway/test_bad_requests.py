"""What bad input gets: the field's name, before anything is sent anywhere."""

import msgspec
import pytest

from gateway.errors import InvalidRequest
from gateway.parsing import parse_chat, parse_completion, parse_tokenize

MESSAGES = [{"role": "user", "content": "Hi"}]


def refusal(parse, **fields) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(msgspec.json.encode(fields))
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "much"}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {str(n): 0 for n in range(1025)}),
        ("min_p", 1.01),
        ("min_tokens", -1),
        ("repetition_penalty", 0),
        ("repetition_penalty", "high"),
        ("echo", True),
        ("priority", -1),
        ("colour", "red"),
        ("cache_salt", "x"),
        ("lora_path", "/etc"),
        ("temperature", 2.01),
        ("temperature", -0.1),
        ("temperature", "warm"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("max_tokens", 1.5),
        ("max_completion_tokens", -1),
        ("n", 17),
        ("n", 0),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("top_logprobs", 21),
        ("logprobs", 3),
        ("stop", 5),
        ("stop", ""),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("seed", 2**63),
        ("stream", "yes"),
        ("user", 7),
        ("model", ""),
        ("model", None),
        ("messages", []),
        ("messages", "Hi"),
    ],
)
def test_bad_field_of_a_chat_is_named(field, value):
    error = refusal(parse_chat, **({"model": "m", "messages": MESSAGES} | {field: value}))

    assert error.param.split("[")[0] == field
    assert field in str(error)


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_missing_field_is_named(missing):
    fields = {"model": "m", "messages": MESSAGES}
    del fields[missing]

    error = refusal(parse_chat, **fields)

    assert (error.param, error.code) == (missing, "missing_field")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": "x", "mood": "y"}, "messages[0].mood"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "assistant", "content": "x", "tool_calls": [1]}, "messages[0].tool_calls"),
    ],
)
def test_bad_message_is_named_by_its_place(message, param):
    error = refusal(parse_chat, model="m", messages=[message])

    assert error.param.startswith(param)


def test_answer_of_a_client_library_can_be_sent_back():
    kept = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None}

    request = parse_chat(msgspec.json.encode({"model": "m", "messages": [kept]}))

    assert msgspec.to_builtins(request)["messages"] == [{"role": "assistant", "content": "x"}]


def test_null_is_the_same_as_leaving_a_field_out():
    fields = {"model": "m", "messages": MESSAGES, "temperature": None, "stop": None, "n": None}

    request = parse_chat(msgspec.json.encode(fields))

    assert msgspec.to_builtins(request) == {"model": "m", "messages": MESSAGES}


@pytest.mark.parametrize(
    "prompt", ["text", ["one", "two"], [1, 2, 3], [[1, 2], [3]], [""], [[5], []]]
)
def test_four_kinds_of_prompt_are_taken(prompt):
    assert parse_completion(msgspec.json.encode({"model": "m", "prompt": prompt})).prompt == prompt


@pytest.mark.parametrize("prompt", [[], None, 5, {"a": 1}, ["a", 1], [[1], 2], [-1], [[2**31]]])
def test_other_prompts_are_refused(prompt):
    error = refusal(parse_completion, model="m", prompt=prompt)

    assert error.param.startswith("prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": 1}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
        ({"top_logprobs": 3}, "top_logprobs"),
    ],
)
def test_bad_field_of_a_completion_is_named(fields, param):
    assert refusal(parse_completion, model="m", prompt="x", **fields).param == param


def test_every_field_of_sampling_is_passed_on_as_it_came():
    fields = {
        "model": "m",
        "prompt": [[1, 2]],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 0,
        "n": 16,
        "min_p": 0.5,
        "min_tokens": 3,
        "repetition_penalty": 1.5,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "logit_bias": {"5": -100.0, "6": 100.0},
        "seed": 1234,
    }

    request = parse_completion(msgspec.json.encode(fields))

    assert msgspec.json.decode(msgspec.json.encode(request)) == fields


def test_bad_key_of_an_object_is_called_a_key():
    error = refusal(parse_chat, model="m", messages=MESSAGES, logit_bias={"five": 1})

    assert "a key: expected `int`" in str(error)


def test_top_logprobs_want_logprobs():
    assert refusal(parse_chat, model="m", messages=MESSAGES, top_logprobs=3).param == "top_logprobs"


def test_tokenize_takes_a_prompt_or_messages_and_not_both():
    for fields in ({}, {"prompt": "x", "messages": MESSAGES}):
        assert refusal(parse_tokenize, model="m", **fields).param == "prompt"


def test_offending_number_is_shown_and_offending_text_is_not():
    assert "3.5" in str(refusal(parse_chat, model="m", messages=MESSAGES, temperature=3.5))
    assert "secret" not in str(refusal(parse_chat, model="m", messages="my secret"))


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"model": ', b"\xff\xfe", b"[" * 5000, b'{"model": NaN}', b"null", b"[]"],
)
def test_what_is_no_json_object_is_a_bad_request(body):
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(body)

    assert caught.value.status == 400


@pytest.mark.anyio
async def test_bad_request_has_openai_s_shape_and_reaches_no_worker(world):
    answer = await world.complete("tiny", temperature=9)

    assert answer.status_code == 400
    assert answer.json() == {
        "error": {
            "message": "the field `temperature`: expected `float` <= 2.0, not 9",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_request",
        }
    }
    assert world.worker.sent == []


@pytest.mark.anyio
async def test_too_long_a_body_is_refused_with_both_numbers(world):
    answer = await world.http.post("/v1/completions", content=b"x" * (32 * 2**20 + 1))

    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
