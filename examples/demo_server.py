"""A `loraplex serve` of one's own: start it, talk to it, end it."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
LORAPLEX = Path(sys.executable).parent / "loraplex"


class ServerDidNotStart(Exception):
    """`loraplex serve` ended or said "failed" before it was ready."""


class DemoServer:
    """One `loraplex serve` on a free port with a state folder that lives as long as it does."""

    def __init__(self, model: Path, served_model_name: str) -> None:
        self._model = model
        self._served_model_name = served_model_name
        self._folder = tempfile.TemporaryDirectory(prefix="loraplex-demo-")
        self._process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None
        self.url = ""
        self.pids: list[int] = []

    async def start(self) -> None:
        """Return when it serves; shows its start-up steps as they come."""
        self._process = await asyncio.create_subprocess_exec(
            *(str(LORAPLEX), "serve", str(self._model), "--port", "0", "--json"),
            *("--served-model-name", self._served_model_name),
            *("--state-dir", self._folder.name),
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await self._wait_until_ready()
        except TimeoutError as error:
            raise ServerDidNotStart(f"not ready after {START_TIMEOUT_S:.0f} s") from error
        self.url = ready["url"]
        pids = ready["pids"]
        self.pids = [pids["gateway"], pids["valkey"], *pids["workers"]]
        self._drain = asyncio.create_task(self._read_on())

    async def _wait_until_ready(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                return dict(event)
            if event["event"] == "failed":
                raise ServerDidNotStart(event["message"])
            if event["event"] == "progress":
                print(f"  {event['step']:<10} {event['text']}", flush=True)
        raise ServerDidNotStart(f"it ended with exit code {await self._process.wait()}")

    async def _read_on(self) -> None:
        """Keep the pipe empty, and show what a person should know of."""
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] in {"ended", "restarted", "failed"}:
                print(f"  server: {line.decode().strip()}", flush=True)

    async def stop(self) -> int:
        """Ask it to end, as Ctrl-C does; return its exit code."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        assert self._process.returncode is not None
        return self._process.returncode

    def living_pids(self) -> list[int]:
        """Which of its processes are still there."""
        return [pid for pid in self.pids if pid and _lives(pid)]

    async def close(self) -> None:
        """End it whatever state it is in, and remove its folder."""
        if self._process is not None and self._process.returncode is None:
            with suppress(TimeoutError):
                await self.stop()
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
        if self._drain is not None:
            await self._drain
        self._folder.cleanup()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
