"""One streamed chat answer, and what it cost."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec

from gateway.cli.client import ApiClient
from gateway.cli.output import CliError


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came. `version` says exactly what ran; `ttft_s` is None when no text came."""

    model: str
    version: str | None
    worker: str | None
    text: str
    finish_reason: str | None
    usage: dict[str, Any] | None
    ttft_s: float | None
    total_s: float

    @property
    def summary(self) -> str:
        """One line for a person."""
        parts = [] if self.version is None else [self.version[:19]]
        if self.ttft_s is not None:
            parts.append(f"first token after {self.ttft_s:.2f} s")
        num_tokens = (self.usage or {}).get("completion_tokens", 0)
        if self.ttft_s is not None and num_tokens > 1 and self.total_s > self.ttft_s:
            parts.append(f"{(num_tokens - 1) / (self.total_s - self.ttft_s):.1f} tok/s")
        if self.finish_reason == "length":
            parts.append("cut off at --max-tokens")
        return ", ".join(parts)


def stream_answer(
    client: ApiClient, body: dict[str, Any], *, show: Callable[[str], None]
) -> Answer:
    """Ask for a stream and hand each piece of text to `show` as it comes.

    Raises CliError when the server refuses, and when it reports an error within the stream.
    """
    started = time.monotonic()
    ttft_s: float | None = None
    pieces: list[str] = []
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("/v1/chat/completions", body=wanted) as response:
        for event in _events(response):
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                finish_reason = choice.get("finish_reason") or finish_reason
                text = choice.get("delta", {}).get("content")
                if text:
                    if ttft_s is None:
                        ttft_s = time.monotonic() - started
                    pieces.append(text)
                    show(text)
    return Answer(
        model=body["model"],
        version=response.headers.get("x-loraplex-version"),
        worker=response.headers.get("x-loraplex-worker"),
        text="".join(pieces),
        finish_reason=finish_reason,
        usage=usage,
        ttft_s=ttft_s,
        total_s=time.monotonic() - started,
    )


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of each event up to `[DONE]`; comments that keep the line alive are left out."""
    for line in response.iter_lines():
        name, separator, data = line.partition(":")
        if not separator or name != "data":
            continue
        data = data.removeprefix(" ")
        if data == "[DONE]":
            return
        event = msgspec.json.decode(data, type=dict[str, Any])
        if event.get("error"):
            message = event["error"].get("message", "the answer broke off")
            raise CliError(str(message), body={"error": event["error"]})
        yield event
    raise CliError("the answer broke off before its end")
