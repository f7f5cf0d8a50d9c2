"""How a generation becomes an HTTP answer, whole or streamed, for chat and completions alike."""

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from engine.server.choice import Delta
from engine.server.event_stream import PING, PING_AFTER_S, EventStreamResponse, event, unless_gone
from engine.server.generation import Generation
from engine.server.identifiers import new_id, unix_time_s
from engine.server.metrics import Metrics
from engine.server.openai_responses import Answer, Usage
from engine.server.openai_schema import SamplingFields
from engine.server.scores import TokenScores


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeChoice:
    """One choice when everything has arrived."""

    index: int
    text: str
    scores: tuple[TokenScores, ...]
    finish_reason: str | None


class AnswerShape(Protocol):
    """How one endpoint writes choices."""

    endpoint: str
    id_prefix: str
    object_name: str
    chunk_object_name: str

    def opening(self, index: int) -> object | None:
        """What a choice's stream begins with, if anything."""

    def chunk(self, delta: Delta) -> object:
        """One piece of a choice."""

    def whole(self, choice: WholeChoice) -> object:
        """One choice when everything has arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The part of an answer that doesn't change: who answers whom."""

    answer_id: str
    created: int
    model: str
    with_usage: bool
    with_running_usage: bool

    def wrap(
        self, object_name: str, choices: list[object], usage: Usage | UnsetType | None
    ) -> Answer:
        """An answer, or a chunk of one."""
        return Answer(
            id=self.answer_id,
            object=object_name,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
        )


def answer_head(shape: AnswerShape, body: SamplingFields, headers: Mapping[str, str]) -> AnswerHead:
    """Take from a request what its answer repeats."""
    options = body.stream_options
    with_usage = options is not None and bool(options.include_usage)
    return AnswerHead(
        answer_id=f"{shape.id_prefix}-{new_id()}",
        created=unix_time_s(),
        model=headers.get("x-loraplex-model", body.model),
        with_usage=with_usage,
        with_running_usage=options is not None and bool(options.continuous_usage_stats),
    )


async def respond(
    request: Request,
    generation: Generation,
    *,
    shape: AnswerShape,
    body: SamplingFields,
    metrics: Metrics,
) -> Response:
    """Answer with what the generation brings, and close it however this ends.

    A stream's response begins with the first token, or after a while without one; until then a
    failure still gets its own status.
    """
    head = answer_head(shape, body, request.headers)
    began_s = time.monotonic()

    def close() -> None:
        generation.close()
        metrics.count(generation, endpoint=shape.endpoint, began_s=began_s)

    try:
        if not body.stream:
            answer = await unless_gone(request.receive, _collect(generation, shape, head))
            close()
            return Response(msgspec.json.encode(answer), media_type="application/json")
        await unless_gone(request.receive, generation.wait_for_first(PING_AFTER_S))
    except BaseException:
        close()
        raise
    return EventStreamResponse(_events(generation, shape, head), on_close=close)


async def _collect(generation: Generation, shape: AnswerShape, head: AnswerHead) -> Answer:
    texts: list[list[str]] = [[] for _ in generation.choices]
    scores: list[list[TokenScores]] = [[] for _ in generation.choices]
    while not generation.is_over:
        delta = await generation.next_delta()
        if delta is not None:
            texts[delta.index].append(delta.text)
            scores[delta.index].extend(delta.scores)
    wholes = [
        WholeChoice(
            index=choice.index,
            text="".join(texts[choice.index]),
            scores=tuple(scores[choice.index]),
            finish_reason=choice.finish_reason,
        )
        for choice in generation.choices
    ]
    choices = [shape.whole(whole) for whole in wholes]
    return head.wrap(shape.object_name, choices, generation.usage())


async def _events(
    generation: Generation, shape: AnswerShape, head: AnswerHead
) -> AsyncGenerator[bytes, None]:
    def chunk(choice: object) -> bytes:
        usage: Usage | UnsetType | None = None if head.with_usage else UNSET
        if head.with_running_usage:
            usage = generation.usage()
        return event(head.wrap(shape.chunk_object_name, [choice], usage))

    openings = [shape.opening(choice.index) for choice in generation.choices]
    # What is there at the same time is sent at the same time.
    ready = [chunk(opening) for opening in openings if opening is not None]
    if ready and not generation.has_delta:
        yield b"".join(ready)
        ready.clear()
    while not generation.is_over:
        delta = await generation.next_delta(PING_AFTER_S)
        if delta is None:
            ready.append(PING)
        elif delta.text or delta.scores or delta.finish_reason is not None:
            ready.append(chunk(shape.chunk(delta)))
        if ready and not generation.has_delta and not generation.is_over:
            yield b"".join(ready)
            ready.clear()
    if head.with_usage:
        ready.append(event(head.wrap(shape.chunk_object_name, [], generation.usage())))
    if ready:
        yield b"".join(ready)
