"""The state folder: what outlives a run, and the one lock that says who uses it."""

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from gateway.embedded.errors import StateFolderBroken, StateFolderBusy

STATE_DIR_VARIABLE = "LORAPLEX_STATE_DIR"
# A unix socket's path fits 104 bytes on macOS and 108 on Linux, its closing zero included.
MAX_SOCKET_PATH_BYTES = 103


def default_state_dir() -> Path:
    """The folder named by LORAPLEX_STATE_DIR, else the user's own for this program."""
    named = os.environ.get(STATE_DIR_VARIABLE)
    return Path(named).expanduser() if named else platformdirs.user_state_path("loraplex")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFolder:
    """Where each thing that outlives a run is kept."""

    root: Path

    @property
    def valkey_dir(self) -> Path:
        return self.root / "valkey"

    @property
    def store_dir(self) -> Path:
        return self.root / "store"

    @property
    def logs_dir(self) -> Path:
        return self.root / "logs"

    @property
    def pids_file(self) -> Path:
        return self.root / "pids.json"

    @property
    def lock_file(self) -> Path:
        return self.root / "serve.lock"

    def prepare(self) -> None:
        """Create the folders, readable by this user only; raises StateFolderBroken."""
        try:
            for folder in (self.root, self.valkey_dir, self.store_dir, self.logs_dir):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StateFolderBroken(
                f"the state folder {self.root} can't be used ({error.strerror}); choose another "
                f"with --state-dir or {STATE_DIR_VARIABLE}"
            ) from error
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise StateFolderBroken(
                f"the state folder {self.root} isn't writable; choose another with --state-dir "
                f"or {STATE_DIR_VARIABLE}"
            )


@contextmanager
def locked(folder: StateFolder) -> Iterator[None]:
    """Own `folder` until the block ends or this process dies; raises StateFolderBusy at once."""
    with folder.lock_file.open("a+", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise StateFolderBusy(
                f"another loraplex serve uses this state folder (pid {owner}): {folder.root}; "
                "stop it, or choose another folder with --state-dir"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def runtime_dir(folder: StateFolder) -> Path:
    """A short folder for this state folder's socket, the same in every run; it may not exist."""
    key = hashlib.sha256(os.fsencode(folder.root.resolve())).hexdigest()[:10]
    name = f"loraplex-{os.getuid()}-{key}"
    path = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / name
    if len(os.fsencode(path / "valkey.sock")) > MAX_SOCKET_PATH_BYTES:
        path = Path("/tmp") / name  # noqa: S108 - private by mode and owner, checked when made
    return path


def make_private(path: Path) -> None:
    """Make the folder, or accept one that only this user can enter; raises StateFolderBroken."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise StateFolderBroken(
            f"the runtime folder {path} can't be made ({error.strerror}); set XDG_RUNTIME_DIR "
            "to a folder of yours"
        ) from error
    private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) & 0o077 == 0
    if not private or found.st_uid != os.getuid():
        raise StateFolderBroken(
            f"the runtime folder {path} isn't private to you; remove it, or set XDG_RUNTIME_DIR "
            "to a folder of yours"
        )
