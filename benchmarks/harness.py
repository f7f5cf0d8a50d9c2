"""Streams completions over HTTP at a fixed concurrency and says how long things took."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from raw_stream import post


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request: which model, the prompt as token ids, and what else its server wants to know."""

    model: str
    prompt_ids: list[int]
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When the texts of one stream came, in seconds of the monotonic clock."""

    started_s: float
    text_times_s: tuple[float, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What one workload did at one concurrency.

    output_tokens_per_s  all output tokens over the wall time of the level, prompts included
    ttft_p50_s           median seconds from the call to the first text
    inter_token_p50_ms   median over requests of the mean time between tokens after the first
    """

    concurrency: int
    num_requests: int
    num_output_tokens: int
    wall_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_max_s: float
    inter_token_p50_ms: float


async def run_level(url: str, calls: Sequence[Call], *, concurrency: int, max_tokens: int) -> Level:
    """Send all calls, `concurrency` at a time, each the moment another has ended."""
    queue = iter(calls)
    timings: list[Timing] = []

    async def one_after_another() -> None:
        for call in queue:
            timing = await stream_completion(url, call, max_tokens=max_tokens)
            timings.append(timing)

    started_s = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
    wall_s = time.perf_counter() - started_s
    return summarise(timings, concurrency=concurrency, wall_s=wall_s)


async def stream_completion(url: str, call: Call, *, max_tokens: int) -> Timing:
    """Stream one greedy completion of exactly `max_tokens` tokens."""
    body = {
        "model": call.model,
        "prompt": call.prompt_ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **call.extra,
    }
    started_s = time.perf_counter()
    answer = await post(url, "/v1/completions", body)
    if answer.status != HTTPStatus.OK:
        raise RuntimeError(f"{answer.status}: {answer.body.decode(errors='replace')[:500]}")
    text_times_s: list[float] = []
    num_tokens = 0
    for time_s, event in answer.events():
        if event.get("error"):
            raise RuntimeError(str(event["error"]))
        if any(choice["text"] for choice in event["choices"]):
            text_times_s.append(time_s)
        if event.get("usage"):
            num_tokens = event["usage"]["completion_tokens"]
    if num_tokens != max_tokens or not text_times_s:
        raise RuntimeError(f"{num_tokens} tokens came where {max_tokens} were asked for")
    return Timing(started_s=started_s, text_times_s=tuple(text_times_s), num_tokens=num_tokens)


def summarise(timings: Sequence[Timing], *, concurrency: int, wall_s: float) -> Level:
    """Reduce the streams of one level to its figures."""
    ttfts_s = [timing.text_times_s[0] - timing.started_s for timing in timings]
    gaps_ms = [
        1000 * (timing.text_times_s[-1] - timing.text_times_s[0]) / (timing.num_tokens - 1)
        for timing in timings
    ]
    num_tokens = sum(timing.num_tokens for timing in timings)
    return Level(
        concurrency=concurrency,
        num_requests=len(timings),
        num_output_tokens=num_tokens,
        wall_s=round(wall_s, 3),
        output_tokens_per_s=round(num_tokens / wall_s, 1),
        ttft_p50_s=round(statistics.median(ttfts_s), 3),
        ttft_max_s=round(max(ttfts_s), 3),
        inter_token_p50_ms=round(statistics.median(gaps_ms), 1),
    )
