"""Starts a Valkey and a scripted worker, tells their pids, and waits to be killed."""

import asyncio
import json
import sys
from pathlib import Path

from gateway.embedded.state import StateFolder
from gateway.embedded.supervisor import Supervisor
from tests.gateway.embedded.worlds import make_valkey, make_worker


async def main() -> None:
    folder = StateFolder(root=Path(sys.argv[1]))
    folder.prepare()
    cores: list[int] = []

    def report(event) -> None:
        if hasattr(event, "details"):
            cores.append(event.details["core_pid"])

    supervisor = Supervisor(pids_file=folder.pids_file, report=report)
    await supervisor.start(make_valkey(folder))
    await supervisor.start(make_worker(folder, report=report))
    sys.stdout.write(json.dumps([*supervisor.pids().values(), *cores]) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
