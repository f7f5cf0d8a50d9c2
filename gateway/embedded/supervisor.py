"""Keeps this run's children alive, in order, and ends them all."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gateway.embedded import leftovers
from gateway.embedded.child import Child, describe_exit
from gateway.embedded.errors import ChildFailed
from gateway.embedded.events import ChildEnded, ChildRestarted, Event

# Seconds before the first, second, … restart in a row; the last one repeats.
BACKOFF_S = (0.0, 0.25, 0.5, 1.0, 2.0)
STEADY_AFTER_S = 10.0
STOP_TIMEOUT_S = 10.0


class Supervisor:
    """Owns the children; nobody else starts, restarts or ends them.

    They start in the order given and stop in reverse. A child that ends unasked is started again,
    at once the first time, later when it ends again within STEADY_AFTER_S.
    """

    def __init__(self, *, pids_file: Path, report: Callable[[Event], None]) -> None:
        self._pids_file = pids_file
        self._report = report
        self._children: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._records: dict[str, leftovers.ChildRecord] = {}

    async def start(self, child: Child) -> None:
        """Start one child and keep it alive from now on.

        Raises ChildFailed if it can't start the first time; it is then ours to stop, no more.
        """
        assert all(other.name != child.name for other in self._children)
        self._children.append(child)
        await self._start_once(child)
        self._watchers.append(asyncio.create_task(self._keep_alive(child)))

    async def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End every child, the last started first, by force after `timeout_s` each."""
        for watcher in self._watchers:
            watcher.cancel()
        for watcher in self._watchers:
            with suppress(asyncio.CancelledError):
                await watcher
        self._watchers.clear()
        while self._children:
            await self._children[-1].stop(timeout_s=timeout_s)
            self._children.pop()
        self._records.clear()
        self._pids_file.unlink(missing_ok=True)

    def kill(self) -> None:
        """End every child now, without waiting; for a user who asks twice."""
        for child in self._children:
            child.kill()

    def pids(self) -> dict[str, int]:
        """The pid of each child by name."""
        return {child.name: child.pid for child in self._children if child.pid is not None}

    async def _start_once(self, child: Child) -> None:
        await child.spawn()
        pid = child.pid
        assert pid is not None, "a spawned child has a pid"
        # Recorded before it is ready: a crash of ours in between must not hide it.
        self._records[child.name] = leftovers.describe(
            name=child.name, pid=pid, marker=child.marker
        )
        try:
            leftovers.write_records(self._pids_file, list(self._records.values()))
        except OSError as error:
            raise ChildFailed(f"{self._pids_file} can't be written ({error.strerror})") from error
        await child.wait_ready()

    async def _keep_alive(self, child: Child) -> None:
        num_restarts = 0
        while True:
            ready_at = time.monotonic()
            status = await child.wait()
            ended_at = time.monotonic()
            if ended_at - ready_at > STEADY_AFTER_S:
                num_restarts = 0
            num_restarts = await self._restart(child, describe_exit(status), num_restarts)
            assert child.pid is not None
            after_s = round(time.monotonic() - ended_at, 3)
            self._report(ChildRestarted(name=child.name, pid=child.pid, after_s=after_s))

    async def _restart(self, child: Child, reason: str, num_restarts: int) -> int:
        """Start `child` until it serves; returns how many restarts there were in a row by now."""
        while True:
            delay_s = BACKOFF_S[min(num_restarts, len(BACKOFF_S) - 1)]
            num_restarts += 1
            self._report(ChildEnded(name=child.name, reason=reason, retry_in_s=delay_s))
            await asyncio.sleep(delay_s)
            try:
                await self._start_once(child)
            except ChildFailed as error:
                reason = str(error)
                await child.stop(timeout_s=0)
            else:
                return num_restarts
