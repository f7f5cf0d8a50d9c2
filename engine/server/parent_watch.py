"""A worker does not outlive whoever started it."""

import os
import stat
import threading

_STDIN = 0


def exit_with_parent() -> None:
    """End this process at once when the parent's end of stdin closes.

    Only a pipe or a socket is watched: from a terminal or /dev/null the worker runs on its own.
    The kernel closes the parent's end however the parent ends, SIGKILL included.
    """
    try:
        mode = os.fstat(_STDIN).st_mode
    except OSError:
        return
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        threading.Thread(target=_wait_for_end, name="parent-watch", daemon=True).start()


def _wait_for_end() -> None:
    try:
        while os.read(_STDIN, 4096):
            pass
    except OSError:
        pass
    os._exit(0)
