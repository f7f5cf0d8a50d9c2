"""Keeps one engine core running: starts it, notices its end, starts it again."""

import asyncio
import contextlib
import logging
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from engine.config import EngineConfig
from engine.errors import CoreBroken
from engine.protocol import CoreReady
from engine.server.core_client import CoreClient, CoreStartFailed
from engine.server.core_environment import core_environment
from engine.server.errors import log_unforeseen
from engine.server.identifiers import new_id
from engine.server.served_model import ServedModel, load_served_model
from engine.server.socket_dir import make_socket_dir

logger = logging.getLogger(__name__)

CORE_COMMAND = (sys.executable, "-m", "engine.core_process")
RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0)
STABLE_AFTER_S = 30.0
_STOP_TIMEOUT_S = 5.0
_STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCore:
    """A core that is ready, until its process ends."""

    instance: str
    process: Process
    client: CoreClient
    reader: "asyncio.Task[None]"
    model: ServedModel

    @property
    def ready(self) -> CoreReady:
        """What the core said of itself."""
        return self.model.ready


class CoreSupervisor:
    """Owns the core's process and sockets. The one writer of `instance` and of which core is up.

    The first start must succeed (`start` raises CoreStartFailed); after that a core that ends is
    replaced, at once and then with growing delays, for as long as it takes.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = CORE_COMMAND,
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        self._config = config
        self._command = tuple(command)
        self._emit = emit
        self._running: RunningCore | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._socket_dir: Path | None = None
        self.instance = new_id()
        self.num_starts = 0

    @property
    def running(self) -> RunningCore:
        """The core that serves now; raises CoreBroken while there is none."""
        if self._running is None:
            raise CoreBroken("the engine core is starting; try again shortly")
        return self._running

    @property
    def is_serving(self) -> bool:
        """Tell whether a core is ready."""
        return self._running is not None

    async def start(self) -> RunningCore:
        """Start the first core and keep one running from then on."""
        assert self._keeper is None, "start is called once"
        self._socket_dir = await asyncio.to_thread(make_socket_dir)
        self._running = await self._launch()
        self._keeper = asyncio.create_task(self._keep_running(self._running))
        return self._running

    async def stop(self) -> None:
        """End the core and start no other."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        if self._socket_dir is not None:
            await asyncio.to_thread(shutil.rmtree, self._socket_dir, ignore_errors=True)

    async def _keep_running(self, core: RunningCore) -> None:
        loop = asyncio.get_running_loop()
        num_failures = 0
        while True:
            began_s = loop.time()
            await self._watch(core)
            if loop.time() - began_s >= STABLE_AFTER_S:
                num_failures = 0
            while True:
                await asyncio.sleep(RESTART_DELAYS_S[min(num_failures, len(RESTART_DELAYS_S) - 1)])
                num_failures += 1
                try:
                    core = await self._launch()
                    break
                except (CoreStartFailed, OSError, zmq.ZMQError) as failure:
                    logger.warning("the engine core did not start (%s)", type(failure).__name__)
                    self._emit({"event": "progress", "text": f"engine core: {failure}"})
            self._running = core
            self._emit({"event": "progress", "text": "engine core: serving again"})

    async def _watch(self, core: RunningCore) -> None:
        """Return when the core has ended, with everything that waited for it failed."""
        ended = asyncio.create_task(core.process.wait())
        try:
            await asyncio.wait({ended, core.reader}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                logger.error("the engine core sent a message that can't be read; ending it")
        finally:
            self._running = None
            ended.cancel()
            await self._end(core.process, core.client, core.reader)
        text = f"engine core: ended with status {core.process.returncode}; starting another"
        logger.error(text)
        self._emit({"event": "progress", "text": text})

    async def _launch(self) -> RunningCore:
        assert self._socket_dir is not None
        self.num_starts += 1
        self.instance = new_id()
        commands = f"ipc://{self._socket_dir}/c{self.num_starts}"
        events = f"ipc://{self._socket_dir}/e{self.num_starts}"
        client = CoreClient(commands=commands, events=events, on_progress=self._progress)
        reader = asyncio.create_task(client.read_events())
        process: Process | None = None
        try:
            process = await self._spawn(commands, events)
            ready = await self._wait_until_ready(process, client, reader)
            model = await _load(ready)
        except BaseException:
            await self._end(process, client, reader)
            raise
        self._config = as_first_measured(self._config, ready)
        return RunningCore(
            instance=self.instance, process=process, client=client, reader=reader, model=model
        )

    async def _spawn(self, commands: str, events: str) -> Process:
        config = msgspec.json.encode(self._config).decode()
        arguments = ("--config", config, "--commands", commands, "--events", events)
        environment = await asyncio.to_thread(core_environment, Path(self._config.state_dir))
        try:
            # Our end of its stdin closes when we end, however that happens: then it ends too.
            return await asyncio.create_subprocess_exec(
                *self._command, *arguments, stdin=PIPE, stdout=_STDERR, env=environment
            )
        except OSError as problem:
            message = f"the engine core's process can't be started: {problem.strerror}"
            raise CoreStartFailed(message, code="engine_unavailable") from problem

    async def _wait_until_ready(
        self, process: Process, client: CoreClient, reader: "asyncio.Task[None]"
    ) -> CoreReady:
        ended = asyncio.create_task(process.wait())
        waits: set[asyncio.Future[Any]] = {ended, client.started, reader}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not client.started.done() and not reader.done():
            await _cancelled(reader)
            with contextlib.suppress(msgspec.DecodeError):
                await client.read_last_words()
        if client.started.done():
            return client.started.result()
        what = "sent a message that can't be read"
        if process.returncode is not None:
            what = f"ended with status {process.returncode} before it was ready"
        raise CoreStartFailed(f"the engine core {what}", code="engine_unavailable")

    async def _end(
        self, process: Process | None, client: CoreClient, reader: "asyncio.Task[None]"
    ) -> None:
        await _cancelled(reader)
        client.break_off(CoreBroken("the engine core has ended; another one is starting"))
        client.close()
        if process is not None:
            await _end_process(process)

    def _progress(self, text: str) -> None:
        self._emit({"event": "progress", "text": text})


def as_first_measured(config: EngineConfig, ready: CoreReady) -> EngineConfig:
    """Give later cores the memory that the first one took: what is free by then says less."""
    budget_bytes = config.memory_bytes or ready.memory.get("budget_bytes")
    return msgspec.structs.replace(config, memory_bytes=budget_bytes)


async def _load(ready: CoreReady) -> ServedModel:
    try:
        return await asyncio.to_thread(load_served_model, ready)
    except Exception as problem:  # tokenizers raises nothing more precise
        message = f"the model's tokenizer or chat template can't be read: {problem}"
        raise CoreStartFailed(message, code="unsupported_model") from problem


async def _end_process(process: Process) -> None:
    """Ask by closing stdin and by SIGTERM, then insist."""
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _cancelled(task: "asyncio.Task[None]") -> None:
    """End the reader; what it could not read is logged, never raised."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and (problem := task.exception()) is not None:
        log_unforeseen(problem)
