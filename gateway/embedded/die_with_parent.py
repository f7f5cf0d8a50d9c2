"""Run a command that the kernel ends when the process that started us dies (Linux).

    python -I -S die_with_parent.py PARENT_PID COMMAND [ARGUMENT …]

A script of its own instead of a function between fork and exec: there, in a process with
threads, Python code can deadlock. The setting survives exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel, make sure that the parent hasn't died meanwhile, become the command."""
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl failed with error {ctypes.get_errno()}")
    if os.getppid() != parent_pid:
        sys.exit("the parent has ended already")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
