"""Streams of other people, which go on while strangers upload what they like."""

import asyncio
import json
import random
import threading
from dataclasses import dataclass

import httpx

NUM_STREAMS = 16
NUM_TOKENS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one bystander asks, again and again."""

    model: str
    prompt: list[int]


def asks(models: list[str]) -> list[Ask]:
    generator = random.Random(11)
    return [
        Ask(
            model=models[number % len(models)],
            prompt=[generator.randrange(3, 500) for _ in range(3 + 2 * number)],
        )
        for number in range(NUM_STREAMS)
    ]


class Bystanders:
    """Sixteen streams at a time, in a thread of their own, each compared with its first answer.

    They stream once, undisturbed, before the block begins; `mismatches` says what changed since.
    """

    def __init__(self, url: str, models: list[str]) -> None:
        self._url = url
        self._asks = asks(models)
        self._undisturbed: list[str] = []
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_finished = 0
        self.mismatches: list[str] = []

    def __enter__(self) -> "Bystanders":
        self._thread.start()
        assert self._started.wait(60)
        assert not self.mismatches, self.mismatches
        return self

    def __exit__(self, *error: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with httpx.AsyncClient(base_url=self._url, timeout=60, trust_env=False) as http:
            try:
                self._undisturbed = list(
                    await asyncio.gather(*(self._stream(http, ask) for ask in self._asks))
                )
            except (AssertionError, httpx.HTTPError) as error:
                self.mismatches.append(f"before anything was uploaded: {error!r}")
                return
            finally:
                self._started.set()
            await asyncio.gather(*(self._repeat(http, number) for number in range(len(self._asks))))

    async def _repeat(self, http: httpx.AsyncClient, number: int) -> None:
        while not self._stop.is_set():
            try:
                text = await self._stream(http, self._asks[number])
            except (AssertionError, httpx.HTTPError) as error:
                self.mismatches.append(f"stream {number}: {error!r}")
                return
            if text != self._undisturbed[number]:
                self.mismatches.append(f"stream {number}: {text} isn't {self._undisturbed[number]}")
            self.num_finished += 1

    async def _stream(self, http: httpx.AsyncClient, ask: Ask) -> str:
        body = {
            "model": ask.model,
            "prompt": ask.prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        text = ""
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, (await answer.aread()).decode()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
        assert len(text.split()) == NUM_TOKENS, text
        return text
