"""`loraplex worker`: a worker on its own, for a gateway elsewhere."""

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from adapters import event_loop
from gateway.cli import engine_flags as flags
from gateway.cli.flags import JsonFlag
from gateway.cli.output import EXIT_FAILED, Output
from gateway.cli.reporter import Report, make_report
from gateway.cli.serve import CLUSTER_TOKEN_VARIABLE, absolute, engine_options
from gateway.cli.serve_options import EngineOptions, is_loopback, parse_memory
from gateway.cli.stopping import StopRequest
from gateway.embedded.errors import EmbeddedError, ServeRefused
from gateway.embedded.events import Failed, Progress, Stopped, Stopping
from gateway.embedded.given_registry import require_answer
from gateway.embedded.leftovers import end_leftovers
from gateway.embedded.own_packages import refuse_foreign_adapters
from gateway.embedded.state import StateFolder, default_state_dir, locked
from gateway.embedded.supervisor import Supervisor
from gateway.embedded.worker import REDIS_VARIABLE, WORKER_COMMAND, WorkerProcess


def worker(
    context: typer.Context,
    redis_url: Annotated[
        str,
        typer.Option("--redis-url", envvar="LORAPLEX_REDIS_URL", help="The gateway's registry."),
    ],
    store: Annotated[
        Path,
        typer.Option("--store", envvar="LORAPLEX_STORE", help="The store shared with gateways."),
    ],
    model: flags.ModelArgument = None,
    host: flags.HostFlag = "127.0.0.1",
    port: flags.PortFlag = 0,
    max_model_len: flags.MaxModelLenFlag = None,
    max_num_seqs: flags.MaxNumSeqsFlag = 64,
    max_tokens_per_step: flags.MaxTokensPerStepFlag = 512,
    memory: flags.MemoryFlag = None,
    block_size: flags.BlockSizeFlag = 16,
    num_threads: flags.NumThreadsFlag = None,
    scheduling: flags.SchedulingFlag = "fair",
    dtype: flags.DtypeFlag = "auto",
    device: flags.DeviceFlag = "cpu",
    attention: flags.AttentionFlag = "auto",
    served_model_name: flags.ServedModelNameFlag = None,
    state_dir: flags.StateDirFlag = None,
    json: JsonFlag = False,
) -> None:
    """Run one worker that joins the gateways of a shared registry."""
    report = make_report(Output(as_json=json))
    parameters = {**context.params, "memory": parse_memory(memory)}
    folder = StateFolder(root=absolute(state_dir or default_state_dir() / "worker"))
    try:
        refuse_foreign_adapters()
        if not is_loopback(host) and not os.environ.get(CLUSTER_TOKEN_VARIABLE):
            raise ServeRefused(
                f"--host {host} can be reached from other machines, so every worker and gateway "
                f"needs the same secret in {CLUSTER_TOKEN_VARIABLE}; set it, or bind 127.0.0.1"
            )
        config = _config(engine_options(parameters), folder=folder, host=host, port=port)
        config["allowed_roots"] = [str(absolute(store).resolve())]
        event_loop.run(run_worker(config, folder, report, redis_url=redis_url))
    except EmbeddedError as error:
        report(Failed(message=str(error)))
        raise typer.Exit(EXIT_FAILED) from error


def _config(
    engine: EngineOptions, *, folder: StateFolder, host: str, port: int
) -> dict[str, object]:
    return {
        "engine": engine.as_config(state_dir=folder.root),
        "host": host,
        "port": port,
        "worker_id": f"w-{secrets.token_hex(4)}",
    }


async def run_worker(
    config: dict[str, object],
    folder: StateFolder,
    report: Report,
    *,
    redis_url: str,
    worker_command: tuple[str, ...] = WORKER_COMMAND,
) -> None:
    """Keep one worker alive until a signal asks to stop; raises EmbeddedError if it can't start."""
    await require_answer(redis_url)
    folder.prepare()
    with locked(folder):
        end_leftovers(folder.pids_file)
        supervisor = Supervisor(pids_file=folder.pids_file, report=report)
        child = WorkerProcess(
            name="worker",
            config=config,
            log=folder.logs_dir / "worker.log",
            report=report,
            command=worker_command,
            env={**os.environ, REDIS_VARIABLE: redis_url},
        )

        def end_at_once() -> None:
            supervisor.kill()
            os._exit(1)

        with StopRequest(at_once=end_at_once) as stop:
            try:
                await stop.run(supervisor.start(child))
                if not stop.asked:
                    report(Progress(step="worker", text="has joined; Ctrl-C stops it"))
                    await stop.wait()
            finally:
                if stop.asked:
                    report(Stopping(text="finishing running requests"))
                await supervisor.stop()
        report(Stopped())
