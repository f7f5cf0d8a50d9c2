"""What every test may lean on: a private Valkey, anyio on asyncio, Hypothesis profiles."""

import os
import signal
from collections.abc import AsyncIterator, Iterator

import hypothesis
import pytest
from redis.asyncio import Redis

from tests.one_openmp import start_again_with_one_openmp
from tests.valkey import private_valkey

# A shell that starts tests in the background may have them ignore Ctrl-C, and what they start too.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("dev", max_examples=25, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
hypothesis.settings.register_profile("deep", max_examples=2000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_configure(config: pytest.Config) -> None:
    """Test as a core runs: with one OpenMP runtime for torch and numba."""
    start_again_with_one_openmp(config)


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
