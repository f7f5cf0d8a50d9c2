"""A private folder for the sockets between server and core, on paths short enough for them."""

import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "loraplex-core-"
_MAX_LENGTH = 70  # of a unix socket's path about 100 bytes are allowed


def make_socket_dir() -> Path:
    """Create the folder; it carries our process id, so that leftovers can be told apart."""
    parent = _parent()
    _remove_leftovers(parent)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))


def _parent() -> Path:
    folder = Path(tempfile.gettempdir())
    # mkdtemp lets only us in, wherever it is.
    return folder if len(str(folder)) <= _MAX_LENGTH else Path("/tmp")  # noqa: S108


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of servers that were killed; those of other users stay."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        process_id = folder.name.removeprefix(_PREFIX).split("-")[0]
        if process_id.isdecimal() and not _is_running(int(process_id)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
