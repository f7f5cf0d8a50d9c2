"""Cutting a stream at event ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sse import EventCutter, EventTooLong, is_comment, is_done, usage_of


@given(st.data())
def test_events_are_the_same_however_the_bytes_are_cut(data):
    end = st.sampled_from([b"\n\n", b"\r\n\r\n"])
    body = st.binary(max_size=12).filter(lambda raw: b"\n" not in raw and b"\r" not in raw)
    events = [b"data: " + data.draw(body) + data.draw(end) for _ in range(data.draw(st.just(5)))]
    stream = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    cutter = EventCutter()

    found = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += cutter.feed(stream[start:stop])

    assert found == events
    assert cutter.rest == b""


@pytest.mark.parametrize("event", [b"data: x\n\n", b"data: x\r\n\r\n", b"event: y\ndata: x\n\n"])
def test_event_that_comes_alone_is_one(event):
    assert EventCutter().feed(event) == [event]


def test_stream_without_ends_is_given_up():
    cutter = EventCutter(max_event_bytes=100)
    cutter.feed(b"x" * 100)

    with pytest.raises(EventTooLong):
        cutter.feed(b"x")


@pytest.mark.parametrize(
    ("event", "usage"),
    [
        (b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n', {"prompt_tokens": 3}),
        (b'data: {"choices": [ ], "usage": {"a": 1}}\r\n\r\n', {"a": 1}),
        (b'data: {"choices":[{"text":"x"}],"usage":{"a":1}}\n\n', None),
        (b'data: {"choices":[],"usage":null}\n\n', None),
        (b'data: {"choices":[{"text":"\\"choices\\":[],\\"usage\\""}],"usage":null}\n\n', None),
        (b'data: {"choices":[{"logprobs":{"choices":[]}}],"usage":{"a":1}}\n\n', None),
        (b": ping\n\n", None),
        (b"data: [DONE]\n\n", None),
        (b'data: {"choices":[],"usage":{\n\n', None),
    ],
)
def test_only_an_event_without_choices_is_the_usage(event, usage):
    assert usage_of(event) == usage


def test_comments_and_the_end_are_recognised():
    assert is_comment(b": ping\n\n")
    assert is_done(b"data: [DONE]\n\n")
    assert is_done(b"data:[DONE]\r\n\r\n")
    assert not is_done(b'data: {"text":"[DONE]"}\n\n')
