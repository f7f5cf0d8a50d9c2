"""Where one core keeps its arena images; nobody else's, and gone after it."""

import os
import shutil
from pathlib import Path


def own_image_dir(parent: Path) -> Path:
    """Return a fresh folder below `parent` for this process; remove those of ended ones."""
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob("core-*"):
        pid = leftover.name.removeprefix("core-").split("-")[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)
    number = 0
    while True:
        own = parent / f"core-{os.getpid()}-{number}"
        try:
            own.mkdir()
        except FileExistsError:
            number += 1
        else:
            return own


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
