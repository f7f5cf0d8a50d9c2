import os
from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from gateway.cli.app import app
from tests.gateway.cli.scripted_server import ScriptedServer, scripted_server


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No variable of the person who runs the tests changes what the commands do."""
    for name in list(os.environ):
        if name.startswith("LORAPLEX_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def server():
    with scripted_server() as script:
        yield script


@dataclass(frozen=True)
class Cli:
    """Runs a command against the scripted server."""

    server: ScriptedServer

    def __call__(self, *arguments: str, **options):
        environment = {"LORAPLEX_URL": self.server.url, **options.pop("env", {})}
        return CliRunner().invoke(app, list(arguments), env=environment, **options)


@pytest.fixture
def cli(server) -> Cli:
    return Cli(server)
