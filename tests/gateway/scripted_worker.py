"""A small worker that speaks the worker protocol and does as the test says."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from adapters.heartbeat import WorkerHeartbeat

EFFECT = {"has_effect": True, "is_finite": True, "logit_gap": 1.5, "noise": 0.0}
NO_EFFECT = {"has_effect": False, "is_finite": True, "logit_gap": 0.0, "noise": 0.0}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@dataclass
class Refusal:
    """Answers the next request with an error."""

    status: int
    code: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Script:
    """How the next stream goes: its words, a gate before the last, whether it breaks there."""

    words: tuple[str, ...] = ("Ahoy", " matey")
    gate: asyncio.Event | None = None
    breaks: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Sent:
    """One request as the worker saw it."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]


class ScriptedWorker:
    """Knows adapters by lora_id, refuses what it wasn't told to load, records everything."""

    def __init__(
        self, worker_id: str = "w-1", *, base_id: str = "tiny", token: str | None = None
    ) -> None:
        self.worker_id = worker_id
        self.base_id = base_id
        self.token = token
        self.instance = "i-1"
        self.address = ""
        self.loaded: dict[str, str] = {}
        self.sent: list[Sent] = []
        self.next: deque[Refusal | Script] = deque()
        self.load_gate: asyncio.Event | None = None
        self.load_refusal: Refusal | None = None
        self.load_begun = asyncio.Event()
        self.unloaded = asyncio.Event()
        # Of versions that are being unloaded until these are set.
        self.drains: dict[str, asyncio.Event] = {}
        self.held: set[str] = set()
        self.status_asked = asyncio.Event()
        self.probe: dict[str, Any] = EFFECT
        self.num_probes = 0
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._generate, methods=["POST"]),
                Route("/v1/completions", self._generate, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/tokenizer_info", self._tokenizer_info, methods=["GET"]),
                Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
                Route("/internal/probe", self._probe, methods=["POST"]),
                Route("/internal/status", self._status),
            ]
        )

    def heartbeat(self, **changes: Any) -> WorkerHeartbeat:
        fields: dict[str, Any] = {
            "worker_id": self.worker_id,
            "address": self.address,
            "base_id": self.base_id,
            "base_identity": "sha256:" + "ab" * 32,
            "instance": self.instance,
            "num_free_blocks": 100,
            "num_blocks": 100,
        }
        return WorkerHeartbeat(**(fields | changes))

    def paths(self) -> list[str]:
        return [sent.path for sent in self.sent]

    def forget_everything(self) -> None:
        """What a restart of the core does, before anybody has noticed."""
        self.loaded.clear()

    def begin_anew(self) -> None:
        """Restart the core under a new instance; nothing of the past is recorded any more."""
        self.forget_everything()
        self.instance = f"{self.instance}-again"
        self.sent.clear()
        self.load_begun.clear()

    async def _note(self, request: Request) -> dict[str, Any]:
        body = json.loads(await request.body() or b"{}")
        self.sent.append(Sent(request.url.path, body, dict(request.headers)))
        return body

    async def _generate(self, request: Request) -> Response:
        body = await self._note(request)
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return _error(401, "invalid_api_key")
        model = body["model"]
        if model != self.base_id and model not in self.loaded:
            return _error(404, "model_not_found")
        step = self.next.popleft() if self.next else Script()
        if isinstance(step, Refusal):
            return _error(step.status, step.code, step.headers)
        public = request.headers.get("x-loraplex-model", model)
        if body.get("stream"):
            events = self._events(step, public, body.get("stream_options") or {})
            return StreamingResponse(events, media_type="text/event-stream")
        if step.gate is not None:
            try:
                await _gate_or_disconnect(request, step.gate)
            finally:
                step.closed.set()
        choice = {"index": 0, "text": "".join(step.words), "finish_reason": "stop"}
        return JSONResponse(
            {
                "id": "c-1",
                "object": "text_completion",
                "model": public,
                "choices": [choice],
                "usage": USAGE,
            }
        )

    async def _events(
        self, step: Script, public: str, options: dict[str, Any]
    ) -> AsyncIterator[str]:
        try:
            yield ": ping\n\n"
            for number, word in enumerate(step.words):
                if number == len(step.words) - 1:
                    if step.gate is not None:
                        await step.gate.wait()
                    if step.breaks:
                        raise ConnectionError("the script says so")
                choice = {"index": 0, "text": word, "finish_reason": None}
                yield _event({"model": public, "choices": [choice]})
            if options.get("include_usage"):
                yield _event({"model": public, "choices": [], "usage": USAGE})
            yield "data: [DONE]\n\n"
        finally:
            step.closed.set()

    async def _tokenize(self, request: Request) -> Response:
        await self._note(request)
        return JSONResponse({"count": 2, "max_model_len": 64, "tokens": [1, 2]})

    async def _detokenize(self, request: Request) -> Response:
        await self._note(request)
        return JSONResponse({"prompt": "Hi"})

    async def _tokenizer_info(self, request: Request) -> Response:
        await self._note(request)
        return JSONResponse({"tokenizer_class": "T", "eos_token": "</s>"})

    async def _load(self, request: Request) -> Response:
        body = await self._note(request)
        self.load_begun.set()
        if self.load_gate is not None:
            await self.load_gate.wait()
        drain = self.drains.get(body["lora_name"])
        if drain is not None and not drain.is_set():
            return _error(409, "adapter_unloaded")
        if self.load_refusal is not None:
            path = body["lora_path"]
            return _error(self.load_refusal.status, self.load_refusal.code, text=f"bad: {path}")
        self.loaded[body["lora_name"]] = body["lora_path"]
        return PlainTextResponse("Success")

    async def _unload(self, request: Request) -> Response:
        body = await self._note(request)
        known = self.loaded.pop(body["lora_name"], None)
        self.unloaded.set()
        if known is not None and (drain := self.drains.get(body["lora_name"])) is not None:
            await drain.wait()
        return PlainTextResponse("Success") if known else _error(404, "model_not_found")

    async def _probe(self, request: Request) -> Response:
        self.num_probes += 1
        if json.loads(await request.body())["lora_name"] not in self.loaded:
            return _error(404, "model_not_found")
        return JSONResponse(self.probe)

    async def _status(self, request: Request) -> Response:
        self.status_asked.set()
        draining = [version for version, ended in self.drains.items() if not ended.is_set()]
        adapters = [
            {
                "lora_id": version,
                "state": "draining" if version in draining else "resident",
                "num_leases": 1 if version in self.held else 0,
                "num_claims": 0,
            }
            for version in sorted({*self.loaded, *draining, *self.held})
        ]
        return JSONResponse({"instance": self.instance, "num_blocks": 100, "adapters": adapters})


async def _gate_or_disconnect(request: Request, gate: asyncio.Event) -> None:
    opened = asyncio.create_task(gate.wait())
    left = asyncio.create_task(request.receive())
    try:
        await asyncio.wait({opened, left}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        opened.cancel()
        left.cancel()


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def _error(
    status: int, code: str, headers: dict[str, str] | None = None, *, text: str = "no"
) -> Response:
    error = {"message": text, "type": "error", "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status, headers=headers)
