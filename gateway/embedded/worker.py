"""A local worker: `python -m engine.server`, which tells how it fares in JSON lines."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gateway.embedded.child import ChildProcess, describe_exit, last_words
from gateway.embedded.errors import ChildFailed
from gateway.embedded.events import Event, Progress, WorkerReady

WORKER_COMMAND = (sys.executable, "-m", "engine.server")
# Where a worker looks for the registry's URL: it may hold a password, and command lines are public.
REDIS_VARIABLE = "LORAPLEX_REDIS_URL"
logger = logging.getLogger(__name__)


def as_first_measured(config: Mapping[str, Any], said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give a worker that is started again the memory that it had: what is free by then says less.

    said   its ready message
    """
    engine, budget_bytes = config.get("engine"), (said.get("memory") or {}).get("budget_bytes")
    if engine is None or not budget_bytes:
        return config
    memory_bytes = engine.get("memory_bytes") or budget_bytes
    return {**config, "engine": {**engine, "memory_bytes": memory_bytes}}


class WorkerProcess:
    """One worker and its reader. `config` is the worker's own, with a worker_id nobody else has.

    The reader goes on after ready, so that the worker never blocks on a full pipe.
    """

    def __init__(
        self,
        *,
        name: str,
        config: Mapping[str, Any],
        log: Path,
        report: Callable[[Event], None],
        command: tuple[str, ...] = WORKER_COMMAND,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.marker: str = config["worker_id"]
        self._config = config
        self._report = report
        self._command = command
        self._env = os.environ if env is None else env
        self._process: ChildProcess | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def spawn(self) -> None:
        config = msgspec.json.encode(self._config).decode()
        self._process = await ChildProcess.start(
            [*self._command, "--config", config], log=self.log, env=self._env, reads_stdout=True
        )
        self._ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(self._process, self._ready))

    async def wait_ready(self) -> None:
        assert self._ready is not None, "spawn comes first"
        await asyncio.shield(self._ready)

    async def wait(self) -> int:
        assert self._process is not None, "spawn comes first"
        return await self._process.wait()

    async def stop(self, *, timeout_s: float) -> None:
        if self._process is not None:
            await self._process.stop(timeout_s=timeout_s)
        if self._reader is not None:
            await self._reader

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill_group()

    async def _read(self, process: ChildProcess, ready: asyncio.Future[None]) -> None:
        while (line := await process.read_line()) != b"":
            self._take(line, process=process, ready=ready)
        if not ready.done():
            how = describe_exit(await process.wait())
            said = last_words(self.log)
            self._fail(ready, f"it {how}{': ' if said else ''}{said}; its log is {self.log}")

    def _take(self, line: bytes, *, process: ChildProcess, ready: asyncio.Future[None]) -> None:
        try:
            said = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:
            logger.warning("%s wrote a line that isn't a JSON object", self.name)
            return
        kind = said.pop("event", None)
        if kind == "progress":
            self._report(Progress(step=self.name, text=str(said.get("text", ""))))
        elif kind == "failed":
            self._fail(ready, str(said.get("message", "it gave no reason")))
        elif kind == "ready" and not ready.done():
            self._config = as_first_measured(self._config, said)
            self._report(WorkerReady(name=self.name, pid=process.pid, details=said))
            ready.set_result(None)

    def _fail(self, ready: asyncio.Future[None], message: str) -> None:
        if ready.done():
            logger.warning("%s: %s", self.name, message)
            return
        ready.set_exception(ChildFailed(f"{self.name} can't start: {message}"))
        ready.exception()  # marked as seen: nobody may be waiting when a stop comes in between
