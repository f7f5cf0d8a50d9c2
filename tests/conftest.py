"""What every test may lean on: a private Valkey, anyio on asyncio, Hypothesis profiles."""

import os
import signal
from collections.abc import AsyncIterator, Iterator

import hypothesis
import pytest
from redis.asyncio import Redis

from engine.server.core_environment import core_environment
from tests.valkey import private_valkey

# A shell that starts tests in the background may have them ignore Ctrl-C, and what they start too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported: test processes share the cores with the servers that they start.
os.environ.update(core_environment())

hypothesis.settings.register_profile("dev", max_examples=25, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
hypothesis.settings.register_profile("deep", max_examples=2000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """One private Valkey server for the whole session."""
    with private_valkey() as url:
        yield url


@pytest.fixture
async def redis_client(valkey_url: str, anyio_backend: str) -> AsyncIterator[Redis]:
    """A client of an empty database."""
    client = Redis.from_url(valkey_url)
    await client.flushall()
    yield client
    await client.aclose()
