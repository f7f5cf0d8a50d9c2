"""`python -m engine.server.kernel_report STATE_DIR`: engine.kernel_report, started as a core is."""

import os
import sys
from pathlib import Path

from engine.server.core_environment import core_environment


def main() -> None:
    """Become the report's process, in a core's environment."""
    arguments = [sys.executable, "-m", "engine.kernel_report"]
    os.execve(sys.executable, arguments, core_environment(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
