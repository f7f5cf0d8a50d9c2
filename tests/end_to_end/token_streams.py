"""Streams of the tiny model whose tokens can be read back: its words are w0, w1, …"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """A whole stream: its tokens, the version that its header names, and what was cached."""

    token_ids: list[int]
    version: str
    num_cached_tokens: int


def greedy_body(model: str, prompt_ids: list[int], *, max_tokens: int) -> dict:
    return {
        "model": model,
        "prompt": prompt_ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def token_ids_of(text: str) -> list[int]:
    return [int(word.removeprefix("w")) for word in text.split()]


async def stream_tokens(
    client: httpx.AsyncClient,
    *,
    model: str,
    prompt_ids: list[int],
    max_tokens: int,
    on_headers: Callable[[str], None] = lambda _version: None,
    on_token: Callable[[], None] = lambda: None,
) -> Streamed:
    """Stream one greedy answer to its end; `on_headers` gets the version as soon as it's known."""
    body = greedy_body(model, prompt_ids, max_tokens=max_tokens)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text, usage = "", {}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.is_error:
            raise AssertionError(f"{answer.status_code}: {(await answer.aread()).decode()}")
        version = answer.headers["x-loraplex-version"]
        on_headers(version)
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event["usage"] or usage
            for choice in event["choices"]:
                text += choice["text"]
                if choice["text"]:
                    on_token()
    token_ids = token_ids_of(text)
    assert len(token_ids) == max_tokens == usage["completion_tokens"], usage
    details = usage["prompt_tokens_details"]
    return Streamed(
        token_ids=token_ids, version=version, num_cached_tokens=details["cached_tokens"]
    )
