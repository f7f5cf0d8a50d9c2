"""`python -m engine.server.kernel_report STATE_DIR`: engine.kernel_report, started as a core is."""

import sys
from pathlib import Path

from engine.server.core_environment import become


def main() -> None:
    """Become the report's process."""
    become(["-m", "engine.kernel_report"], Path(sys.argv[1]))


if __name__ == "__main__":
    main()
