"""The real `loraplex` command, but for the worker's: that one joins without a model."""

import functools
import sys

from gateway.cli import main, serving, worker

JOINING = (sys.executable, "-m", "tests.gateway.cli.joining_worker")
serving.run_serve = functools.partial(serving.run_serve, worker_command=JOINING)
worker.run_worker = functools.partial(worker.run_worker, worker_command=JOINING)

if __name__ == "__main__":
    main()
