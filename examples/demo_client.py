"""What a client of Loraplex does: streams with the official OpenAI SDK, adapters by REST."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

MAX_TOKENS = 80


@dataclass(slots=True, kw_only=True)
class Answer:
    """One streamed answer; filled in while it arrives."""

    model: str
    prompt: str
    version: str = ""
    echoed_model: str = ""
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    started_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft_s(self) -> float:
        """Seconds from the call to the first text."""
        return self.first_s - self.started_s

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second after the first."""
        return (self.num_tokens - 1) / max(self.last_s - self.first_s, 1e-9)


async def stream(
    client: AsyncOpenAI, answer: Answer, *, max_tokens: int = MAX_TOKENS, ignore_eos: bool = False
) -> Answer:
    """Stream one greedy chat answer into `answer`; `begun` is set at its first text."""
    answer.started_s = time.monotonic()
    response = await client.chat.completions.with_raw_response.create(
        model=answer.model,
        messages=[{"role": "user", "content": answer.prompt}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True} if ignore_eos else None,
    )
    answer.version = response.headers.get("x-loraplex-version", "")
    async for chunk in response.parse():
        _take(answer, chunk)
    return answer


def _take(answer: Answer, chunk: Any) -> None:
    now_s = time.monotonic()
    answer.echoed_model = chunk.model
    if chunk.usage is not None:
        answer.num_tokens = chunk.usage.completion_tokens
    for choice in chunk.choices:
        answer.finish_reason = choice.finish_reason or answer.finish_reason
        if choice.delta.content:
            answer.first_s = answer.first_s or now_s
            answer.last_s = now_s
            answer.text += choice.delta.content
            answer.begun.set()


class Admin:
    """The adapter routes of a Loraplex server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=120, trust_env=False)

    async def push(self, name: str, folder: Path, *, promote: bool = False) -> dict[str, Any]:
        """Upload the two files of a PEFT directory."""
        files = [
            ("files", (path.name, path.read_bytes()))
            for path in (folder / "adapter_config.json", folder / "adapter_model.safetensors")
        ]
        data = {"name": name} | ({"promote": "true"} if promote else {})
        return _body(await self._http.post("/v1/adapters", data=data, files=files))

    async def promote(self, name: str, version: str) -> dict[str, Any]:
        """Point the alias `default` at a version."""
        path = f"/v1/adapters/{name}/aliases/default"
        return _body(await self._http.put(path, json={"version": version}))

    async def rollback(self, name: str) -> dict[str, Any]:
        """Point the alias `default` back at the version before."""
        return _body(await self._http.post(f"/v1/adapters/{name}/rollback", json={}))

    async def step_statistics(self) -> dict[str, int]:
        """Count the steps of all workers' cores, by what was in them."""
        workers = _body(await self._http.get("/v1/workers"))["data"]
        statuses = [worker["status"] for worker in workers if worker["status"]]
        counted = ("num_steps", "num_steps_with_several_adapters", "num_steps_with_several_chunks")
        totals = {name: sum(status[name] for status in statuses) for name in counted}
        most = max((status["max_adapters_in_step"] for status in statuses), default=0)
        return totals | {"max_adapters_in_step": most}

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def _body(response: httpx.Response) -> dict[str, Any]:
    if response.is_error:
        raise SystemExit(f"{response.request.method} {response.request.url}: {response.text}")
    return dict(response.json())
