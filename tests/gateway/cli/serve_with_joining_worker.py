"""The real `loraplex` command, but for the worker's: that one joins without a model."""

import functools
import sys

from gateway.cli import main, serving

serving.run_serve = functools.partial(
    serving.run_serve, worker_command=(sys.executable, "-m", "tests.gateway.cli.joining_worker")
)

if __name__ == "__main__":
    main()
