"""The smallest deployments: a real Valkey and a scripted worker in a folder of the test's own."""

import asyncio
import os
import sys
from pathlib import Path

from gateway.embedded.state import StateFolder
from gateway.embedded.valkey import ValkeyProcess, find_binary
from gateway.embedded.worker import WorkerProcess

WAIT_S = 20
SCRIPTED_WORKER = (sys.executable, str(Path(__file__).with_name("scripted_worker.py")))


class Told:
    """A `report` that keeps every event, so that a test can wait for the one it expects."""

    def __init__(self):
        self.events = []
        self._news = asyncio.Event()

    def __call__(self, event):
        self.events.append(event)
        self._news.set()

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    async def wait_for(self, kind, *, number=1):
        """Return the `number`th event of that kind, once it has been told."""
        async with asyncio.timeout(WAIT_S):
            while len(self.of(kind)) < number:
                self._news.clear()
                await self._news.wait()
        return self.of(kind)[number - 1]


def make_valkey(folder: StateFolder, *, binary: Path | None = None) -> ValkeyProcess:
    return ValkeyProcess(binary=binary or find_binary(), folder=folder)


def make_worker(folder: StateFolder, *, report, behaviour: str = "serve") -> WorkerProcess:
    return WorkerProcess(
        name="worker-0",
        config={"worker_id": f"w-{folder.root.name}", "behaviour": behaviour},
        log=folder.logs_dir / "worker-0.log",
        report=report,
        command=SCRIPTED_WORKER,
    )


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and wasn't waited for counts as gone."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return command != b"" and os.getpid() != pid
