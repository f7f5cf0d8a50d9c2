"""Echoed prompts, and their logprobs as evaluation harnesses read them."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from engine.protocol import SequenceOutput, TokenLogprob
from engine.server.prompt_echo import PromptEcho
from engine.server.tokenizer import ModelTokenizer
from tests.engine.server.conftest import RunningWorker
from tests.engine.server.test_answers import FOX, complete, stream
from tests.engine.server.tiny_model import END, START

pytestmark = pytest.mark.anyio

SMILE = "go 🙂 on"


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """One choice of a stream, put together."""
    whole: dict[str, Any] = {"text": "", "logprobs": None}
    for chunk in chunks:
        choice = chunk["choices"][0]
        if choice["index"] != index:
            continue
        whole["text"] += choice["text"]
        if choice["logprobs"] is not None:
            whole["logprobs"] = whole["logprobs"] or {name: [] for name in choice["logprobs"]}
            for name, values in choice["logprobs"].items():
                whole["logprobs"][name] += values
    return whole


async def test_echo_puts_the_prompt_before_the_answer(running: RunningWorker, tokenizer):
    assert (await complete(running, echo=True))["choices"][0]["text"] == FOX + FOX
    ids = tokenizer.encode_now(SMILE, add_special_tokens=False)
    answer = await complete(running, prompt=[ids, ids[:1]], echo=True, n=2)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[:2] == [SMILE + SMILE, SMILE + tokenizer.decode(ids[1:])]
    assert joined(await stream(running, echo=True))["text"] == FOX + FOX


async def test_false_echo_is_none(running: RunningWorker):
    assert (await complete(running, echo=False))["choices"][0]["text"] == FOX


async def test_logprobs_of_an_echo_begin_with_the_prompt_s(running: RunningWorker, tokenizer):
    """As lm-eval asks: the first is null, the last is the one token that was generated."""
    ids = tokenizer.encode_now(SMILE, add_special_tokens=False)
    answer = await complete(running, prompt=[ids], echo=True, logprobs=1, max_tokens=1, seed=1234)
    logprobs = answer["choices"][0]["logprobs"]
    expected = [None, *(-float(n) for n in range(1, len(ids))), -0.5]
    assert logprobs["token_logprobs"] == expected
    assert {len(values) for values in logprobs.values()} == {len(ids) + 1}
    assert logprobs["top_logprobs"][0] is None
    for token, top, value in list(
        zip(logprobs["tokens"], logprobs["top_logprobs"], expected, strict=True)
    )[1:]:
        assert top[token] == value
    assert answer["usage"]["completion_tokens"] == 1


async def test_an_end_token_is_scored_behind_the_prompt(running: RunningWorker):
    """Or a harness that cuts off the last token would lose one of the prompt's."""
    answer = await complete(running, prompt=[[0]], echo=True, logprobs=0, max_tokens=1)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    answer = await complete(
        running, prompt=[[5, 6]], echo=True, logprobs=0, max_tokens=1, stop_token_ids=[5]
    )
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5]
    assert choice["logprobs"]["text_offset"][2] == len(choice["text"])


async def test_echo_without_an_answer_is_the_prompt_alone(running: RunningWorker, tokenizer):
    ids = tokenizer.encode_now(SMILE, add_special_tokens=False)
    for logprobs in (None, 1):
        fields = {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": logprobs}
        answer = await complete(running, **fields)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (SMILE, "length")
        assert answer["usage"]["completion_tokens"] == 0
        if logprobs is not None:
            assert len(choice["logprobs"]["tokens"]) == len(ids)
        assert joined(await stream(running, **fields)) == {
            "text": choice["text"],
            "logprobs": choice["logprobs"],
        }
    await running.wait_until_idle()


async def test_streamed_echo_joins_to_the_whole(running: RunningWorker):
    fields = {"prompt": [SMILE, FOX], "echo": True, "logprobs": 2, "n": 3, "stop": "fox"}
    whole = await complete(running, **fields)
    chunks = await stream(running, **fields)
    for choice in whole["choices"]:
        expected = {"text": choice["text"], "logprobs": choice["logprobs"]}
        assert joined(chunks, choice["index"]) == expected


async def test_a_long_prompt_is_scored_as_a_short_one(running: RunningWorker, monkeypatch):
    fields = {"prompt": SMILE, "echo": True, "logprobs": 2}
    short = await complete(running, **fields)
    monkeypatch.setattr("engine.server.generation._MAX_SCORED_INLINE", 2)
    assert (await complete(running, **fields))["choices"] == short["choices"]


async def test_offsets_of_an_echo_are_where_tokens_begin(running: RunningWorker, tokenizer):
    prompt = f"{START}user\n{SMILE}{END} and"
    choice = (await complete(running, prompt=prompt, echo=True, logprobs=0))["choices"][0]
    num_prompt_ids = len(tokenizer.encode_now(prompt, add_special_tokens=False))
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    for place, (token, offset) in enumerate(
        zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    ):
        is_shown = place < num_prompt_ids or token not in (START, END)
        if is_shown and not token.startswith("bytes:"):
            assert choice["text"].startswith(token, offset)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


async def test_a_stop_string_in_the_prompt_ends_nothing(running: RunningWorker):
    answer = await complete(running, prompt="one STOP two", stop="two", echo=True)
    assert answer["choices"][0]["text"] == "one STOP twoone STOP "


@pytest.fixture(scope="module")
def with_first_token() -> ModelTokenizer:
    """As Llama's: words with a low line, and a first special token that isn't in the text."""
    words = ["<s>", "\u2581hello", "\u2581world"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return ModelTokenizer(tokenizer)


def echo_of(tokenizer: ModelTokenizer, ids: list[int], text: str | None) -> PromptEcho:
    echo = PromptEcho(tokenizer, ids, text=text, is_scored=True, is_whole_answer=False)
    scored = [[TokenLogprob(token_id, -1.0)] for token_id in ids[1:]]
    echo.take(SequenceOutput(request_id="r", token_ids=[], prompt_logprobs=[None, *scored]))
    return echo


def test_a_first_special_token_is_not_in_the_client_s_text(with_first_token):
    echo = echo_of(with_first_token, [0, 1, 2], "hello world")
    assert echo.text == "hello world"
    assert [score.text_offset for score in echo.scores] == [0, 0, 5]


def test_a_first_special_token_that_was_sent_as_an_id_is_in_the_text(with_first_token):
    echo = echo_of(with_first_token, [0, 1, 2], None)
    assert echo.text == "<s> hello world"
    assert [score.text_offset for score in echo.scores] == [0, 3, 9]
