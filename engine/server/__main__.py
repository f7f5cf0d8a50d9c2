"""`python -m engine.server --config JSON`: one worker, its core included.

Writes one JSON object a line to stdout: `progress`, then `ready` or `failed`. Logs go to stderr.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from adapters import event_loop
from adapters.redis_connection import connect
from engine.server.app import create_app
from engine.server.core_client import CoreStartFailed
from engine.server.core_supervisor import CORE_COMMAND, CoreSupervisor, RunningCore
from engine.server.heartbeat import Announcer
from engine.server.http_server import address_of, bind, create_http_server, drain_on_signals
from engine.server.parent_watch import exit_with_parent
from engine.server.settings import InvalidSettings, WorkerSettings, read_settings
from engine.server.worker import Worker


def main(core_command: Sequence[str] = CORE_COMMAND) -> int:
    """Run the worker until a signal or the parent's end; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine.server", description=__doc__)
    parser.add_argument("--config", required=True, help="WorkerSettings as JSON")
    arguments = parser.parse_args()
    level = os.environ.get("LORAPLEX_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(
        stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    exit_with_parent()
    try:
        settings = read_settings(arguments.config)
        event_loop.run(serve(settings, core_command))
    except InvalidSettings as problem:
        _emit({"event": "failed", "message": str(problem), "code": "invalid_settings"})
        return 2
    except CoreStartFailed as problem:
        _emit({"event": "failed", "message": str(problem), "code": problem.code})
        return 1
    return 0


async def serve(settings: WorkerSettings, core_command: Sequence[str] = CORE_COMMAND) -> None:
    """Start the core, serve until told to stop, and end everything that was started."""
    listener = bind(settings.host, settings.port)
    supervisor = CoreSupervisor(settings.engine, command=core_command, emit=_emit)
    worker = Worker(settings=settings, supervisor=supervisor)
    server = create_http_server(create_app(worker))
    main_task = asyncio.current_task()
    assert main_task is not None

    def drain() -> None:
        worker.is_draining = True
        if not server.started:
            main_task.cancel()

    drain_on_signals(server, drain)
    address = settings.advertised_address or address_of(listener, settings.host)
    try:
        core = await supervisor.start()
        announcer = _announcer(worker, address)
        listener.listen(2048)
        _emit(_ready_line(core, address))
        try:
            await server.serve(sockets=[listener])
        finally:
            if announcer is not None:
                await announcer.stop()
    except asyncio.CancelledError:
        if not worker.is_draining:
            raise
    finally:
        listener.close()
        await supervisor.stop()


def _announcer(worker: Worker, address: str) -> Announcer | None:
    if worker.settings.redis_url is None:
        return None
    client = connect(worker.settings.redis_url)
    announcer = Announcer(worker, address=address, client=client)
    announcer.start()
    return announcer


def _ready_line(core: RunningCore, address: str) -> dict[str, Any]:
    ready = msgspec.to_builtins(core.ready)
    del ready["type"]
    return {"event": "ready", "address": address, "instance": core.instance, **ready}


def _emit(line: dict[str, Any]) -> None:
    """Tell the parent. A parent that no longer reads must not stop the worker."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()
    except OSError:
        logging.getLogger(__name__).warning("nobody reads the worker's stdout")


if __name__ == "__main__":
    sys.exit(main())
