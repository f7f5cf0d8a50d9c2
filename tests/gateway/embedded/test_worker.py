"""What a worker that ended is started again with."""

import sys
from pathlib import Path

import msgspec
import pytest

from gateway.embedded.events import WorkerReady
from gateway.embedded.worker import WorkerProcess

pytestmark = pytest.mark.anyio

# Says what it was told as its memory; a first one has measured 5 GiB.
WORKER = """
import json, sys
told = json.loads(sys.argv[-1])["engine"]["memory_bytes"]
print(json.dumps({"event": "ready", "told": told, "memory": {"budget_bytes": 5 << 30}}), flush=True)
sys.stdin.read()
"""


async def told_twice(tmp_path: Path, memory_bytes: int | None) -> list[int | None]:
    said: list[int | None] = []

    def note(event: msgspec.Struct) -> None:
        assert isinstance(event, WorkerReady)
        said.append(event.details["told"])

    worker = WorkerProcess(
        name="worker-0",
        config={"worker_id": "w-0", "engine": {"memory_bytes": memory_bytes}},
        log=tmp_path / "log",
        report=note,
        command=(sys.executable, "-c", WORKER),
    )
    for _ in range(2):
        await worker.spawn()
        await worker.wait_ready()
        await worker.stop(timeout_s=5)
    return said


async def test_it_takes_the_memory_that_it_measured_the_first_time(tmp_path):
    """Its neighbours have theirs by now: what it would measure is less."""
    assert await told_twice(tmp_path, None) == [None, 5 << 30]


async def test_it_takes_the_memory_that_the_operator_gave_it(tmp_path):
    assert await told_twice(tmp_path, 3 << 30) == [3 << 30, 3 << 30]
