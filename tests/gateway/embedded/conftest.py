from pathlib import Path

import pytest

from gateway.embedded.state import StateFolder
from gateway.embedded.supervisor import Supervisor
from tests.gateway.embedded.worlds import Told


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> StateFolder:
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    made = StateFolder(root=tmp_path / "state")
    made.prepare()
    return made


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
async def supervisor(folder, told, anyio_backend):
    made = Supervisor(pids_file=folder.pids_file, report=told)
    yield made
    await made.stop()
