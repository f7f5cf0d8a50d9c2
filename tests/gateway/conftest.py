"""Fixtures of the gateway's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.gateway.peft_adapters import save_adapters
from tests.gateway.world import World, gateway_world


@pytest.fixture(scope="session")
def peft_adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters with weights of their own, by name."""
    return save_adapters(tmp_path_factory.mktemp("peft"), ["pirate", "json", "brief"])


@pytest.fixture
async def world(
    valkey_url: str, redis_client: Redis, tmp_path: Path, peft_adapters: dict[str, Path]
) -> AsyncIterator[World]:
    """An open gateway with one worker, over an empty registry."""
    async with gateway_world(
        valkey_url, tmp_path / "store", allowed_roots=(peft_adapters["pirate"].parent,)
    ) as running:
        yield running
