import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anyio
import httpx
import pytest

from engine.config import EngineConfig
from engine.server.app import create_app
from engine.server.core_supervisor import CoreSupervisor
from engine.server.http_server import bind, create_http_server
from engine.server.settings import WorkerSettings
from engine.server.tokenizer import ModelTokenizer, load_tokenizer
from engine.server.worker import Worker
from tests.engine.server.tiny_model import write_tiny_model

ECHO_CORE = (sys.executable, "-m", "tests.engine.server.echo_core")


@dataclass
class RunningWorker:
    """A worker with an echo core, behind a real socket."""

    worker: Worker
    address: str
    client: httpx.AsyncClient
    lines: list[dict[str, Any]] = field(default_factory=list)

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    async def num_running(self) -> int:
        return (await self.client.get("/internal/status")).json()["num_running_seqs"]

    async def wait_until_idle(self) -> None:
        """The core has nothing to do; the test's timeout is the limit."""
        while await self.num_running() > 0:  # noqa: ASYNC110  another process
            await anyio.sleep(0.01)

    async def wait_until_healthy(self) -> None:
        while (await self.client.get("/health")).status_code != 200:  # noqa: ASYNC110
            await anyio.sleep(0.05)


class StartWorker(Protocol):
    def __call__(self, **changes: Any) -> AbstractAsyncContextManager[RunningWorker]: ...


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> ModelTokenizer:
    return load_tokenizer(model_dir / "tokenizer.json")


@pytest.fixture(scope="session")
def start_worker(model_dir: Path) -> StartWorker:
    @asynccontextmanager
    async def start(**changes: Any) -> AsyncIterator[RunningWorker]:
        engine = EngineConfig(
            model=str(model_dir),
            state_dir=str(model_dir.parent / "state"),
            served_model_name="tiny",
        )
        settings = WorkerSettings(engine=engine, **changes)
        lines: list[dict[str, Any]] = []
        supervisor = CoreSupervisor(settings.engine, command=ECHO_CORE, emit=lines.append)
        worker = Worker(settings=settings, supervisor=supervisor)
        await supervisor.start()
        listener: socket.socket = bind("127.0.0.1", 0)
        server = create_http_server(create_app(worker))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with anyio.create_task_group() as tasks:
            listener.listen()
            tasks.start_soon(server.serve, [listener])
            async with httpx.AsyncClient(base_url=address, timeout=30) as client:
                yield RunningWorker(worker, address, client, lines)
            server.should_exit = True
        await supervisor.stop()

    return start


@pytest.fixture(scope="module")
async def running(start_worker: StartWorker) -> AsyncIterator[RunningWorker]:
    async with start_worker() as worker:
        yield worker
