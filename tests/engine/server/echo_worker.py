"""`python -m engine.server` with an echo core."""

import sys

from engine.server.__main__ import main
from tests.engine.server.conftest import ECHO_CORE

if __name__ == "__main__":
    sys.exit(main(ECHO_CORE))
