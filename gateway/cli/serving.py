"""One run of `loraplex serve`: start everything in order, keep it alive, end it."""

import asyncio
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

import httpx

from gateway.app import create_app
from gateway.cli.adapter import push_adapter
from gateway.cli.client import ApiClient
from gateway.cli.gateway_server import GatewayServer
from gateway.cli.listening import bind, url_of
from gateway.cli.output import CliError
from gateway.cli.reporter import Report
from gateway.cli.serve_options import AdapterSource, ServeOptions
from gateway.cli.stopping import StopRequest
from gateway.embedded.errors import ServeRefused
from gateway.embedded.events import Event, Progress, Ready, Stopped, Stopping, WorkerReady
from gateway.embedded.given_registry import require_answer
from gateway.embedded.leftovers import end_leftovers
from gateway.embedded.state import StateFolder, locked
from gateway.embedded.supervisor import Supervisor
from gateway.embedded.valkey import ValkeyProcess, find_binary
from gateway.embedded.worker import REDIS_VARIABLE, WORKER_COMMAND, WorkerProcess
from gateway.settings import GatewaySettings

JOIN_TIMEOUT_S = 30.0
POLL_S = 0.05


async def run_serve(
    options: ServeOptions, report: Report, *, worker_command: tuple[str, ...] = WORKER_COMMAND
) -> None:
    """Serve until a signal asks to stop; raises EmbeddedError when serving can't begin."""
    folder = StateFolder(root=options.state_dir)
    with bind(options.host, options.port) as listener:
        folder.prepare()
        with locked(folder):
            for record in end_leftovers(folder.pids_file):
                text = f"ended a leftover of an earlier run (pid {record.pid})"
                report(Progress(step=record.name, text=text))
            run = _Run(options, report, folder=folder, listener=listener)
            await run.until_stopped(worker_command)


class _Run:
    """The parts of one run, between the lock's taking and its release."""

    def __init__(
        self,
        options: ServeOptions,
        report: Report,
        *,
        folder: StateFolder,
        listener: socket.socket,
    ) -> None:
        self._options = options
        self._tell = report
        self._folder = folder
        self._listener = listener
        self._url = url_of(listener)
        self._admin_key = _admin_key(options)
        self._cluster_token = _cluster_token(options)
        self._supervisor = Supervisor(pids_file=folder.pids_file, report=self._report)
        self._gateway: GatewayServer | None = None
        self._base_id: str | None = None
        self._started = time.monotonic()

    async def until_stopped(self, worker_command: tuple[str, ...]) -> None:
        with StopRequest(at_once=self._end_at_once) as stop:
            try:
                await stop.run(self._start(worker_command))
                if not stop.asked:
                    assert self._gateway is not None
                    await stop.run(self._gateway.wait())
                    if not stop.asked:
                        raise ServeRefused("the gateway's server ended by itself; start it again")
            finally:
                await self._stop(asked=stop.asked)

    async def _start(self, worker_command: tuple[str, ...]) -> None:
        redis_url = await self._start_registry()
        await self._start_gateway(redis_url)
        for index in range(self._options.num_workers):
            await self._supervisor.start(self._worker(index, redis_url, worker_command))
        await self._wait_for_workers()
        await self._push_adapters()
        pids = self._supervisor.pids()
        self._tell(
            Ready(
                url=self._url,
                models=await self._models(),
                pids={
                    "gateway": os.getpid(),
                    "valkey": pids.pop("valkey", None),
                    "workers": list(pids.values()),
                },
                redis_url=redis_url if self._options.redis_url is None else "(given)",
                state_dir=str(self._folder.root),
                start_s=round(time.monotonic() - self._started, 2),
            )
        )

    async def _start_registry(self) -> str:
        if self._options.redis_url is not None:
            await require_answer(self._options.redis_url)
            self._tell(Progress(step="registry", text="using the one that --redis-url names"))
            return self._options.redis_url
        valkey = ValkeyProcess(binary=find_binary(), folder=self._folder)
        await self._supervisor.start(valkey)
        self._tell(Progress(step="registry", text=f"a private Valkey is up (pid {valkey.pid})"))
        return valkey.url

    async def _start_gateway(self, redis_url: str) -> None:
        options = self._options
        settings = GatewaySettings(
            redis_url=redis_url,
            store_dir=self._store_dir,
            api_key=options.api_key,
            admin_key=self._admin_key,
            allowed_roots=options.allowed_roots,
            cluster_token=self._cluster_token,
        )
        self._gateway = GatewayServer(create_app(settings), self._listener)
        await self._gateway.start()
        self._tell(Progress(step="gateway", text=f"listens at {self._url}"))

    @property
    def _store_dir(self) -> Path:
        return self._options.store_dir or self._folder.store_dir

    def _worker(self, index: int, redis_url: str, command: tuple[str, ...]) -> WorkerProcess:
        options = self._options
        name = f"worker-{index}"
        self._tell(Progress(step=name, text=f"starting, with {Path(options.engine.model).name}"))
        return WorkerProcess(
            name=name,
            config={
                "engine": options.engine.as_config(
                    state_dir=self._folder.root,
                    worker_index=index,
                    num_workers=options.num_workers,
                ),
                "host": "127.0.0.1",
                "port": 0,
                "worker_id": f"w-{secrets.token_hex(4)}",
                "allowed_roots": [str(self._store_dir.resolve())],
            },
            log=self._folder.logs_dir / f"{name}.log",
            report=self._report,
            command=command,
            env=worker_environment(redis_url, cluster_token=self._cluster_token),
        )

    def _report(self, event: Event) -> None:
        if isinstance(event, WorkerReady):
            self._base_id = event.details.get("base_id")
        self._tell(event)

    async def _wait_for_workers(self) -> None:
        """Return once the gateway has seen every worker's heartbeat."""
        try:
            async with (
                asyncio.timeout(JOIN_TIMEOUT_S),
                httpx.AsyncClient(base_url=self._url, trust_env=False) as client,
            ):
                while True:
                    if await _is_served(client, self._options.num_workers):
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise ServeRefused(
                f"the gateway has seen no heartbeat of its worker in {JOIN_TIMEOUT_S:.0f} s; the "
                f"worker's log is in {self._folder.logs_dir}"
            ) from error

    async def _push_adapters(self) -> None:
        for source in self._options.adapters:
            try:
                answer = await asyncio.to_thread(self._push, source)
            except CliError as error:
                if source.promote:
                    raise ServeRefused(f"--adapter {source.name}={source.path}: {error}") from error
                self._tell(Progress(step="adapter", text=f"{source.name} is left out: {error}"))
                continue
            text = (
                f"{answer['name']}@{answer['version']}: {answer['coverage']}, "
                f"rank {answer['max_rank']}"
            )
            self._tell(Progress(step="adapter", text=text))

    def _push(self, source: AdapterSource) -> dict[str, Any]:
        with ApiClient(url=self._url, key=self._admin_key) as client:
            answer, _ = push_adapter(
                client,
                name=source.name,
                paths=[source.path],
                base=self._base_id,
                promote=source.promote,
            )
        return answer

    async def _models(self) -> list[str]:
        def ask() -> list[str]:
            with ApiClient(url=self._url, key=self._admin_key) as client:
                return [model["id"] for model in client.request("GET", "/v1/models")["data"]]

        try:
            return await asyncio.to_thread(ask)
        except CliError as error:
            raise ServeRefused(f"the gateway doesn't list its models: {error}") from error

    async def _stop(self, *, asked: bool) -> None:
        if asked:
            self._tell(Stopping(text="finishing running requests; Ctrl-C again ends at once"))
        try:
            if self._gateway is not None:
                await self._gateway.stop()
        finally:
            await self._supervisor.stop()
        if asked:
            self._tell(Stopped())

    def _end_at_once(self) -> None:
        self._supervisor.kill()
        os._exit(1)


def worker_environment(redis_url: str, *, cluster_token: str | None) -> dict[str, str]:
    """Our environment, with what is secret and without the keys that only the gateway needs."""
    keys = {"LORAPLEX_API_KEY", "LORAPLEX_ADMIN_KEY"}
    env = {name: value for name, value in os.environ.items() if name not in keys}
    env[REDIS_VARIABLE] = redis_url
    if cluster_token is not None:
        env["LORAPLEX_CLUSTER_TOKEN"] = cluster_token
    return env


def _admin_key(options: ServeOptions) -> str | None:
    """The operator's key. With a data key alone one that nobody knows: the push at start needs it,
    and for everybody else the admin routes stay shut.
    """
    if options.admin_key is None and options.api_key is not None:
        return secrets.token_urlsafe(32)
    return options.admin_key


def _cluster_token(options: ServeOptions) -> str | None:
    """The operator's token. Without one, but with keys, one for this run: a key that only the
    gateway asks for would keep nobody on this machine from calling a worker directly.
    """
    is_private = options.redis_url is None and (options.api_key or options.admin_key)
    if options.cluster_token is None and is_private:
        return secrets.token_hex(32)
    return options.cluster_token


async def _is_served(client: httpx.AsyncClient, num_workers: int) -> bool:
    try:
        health = await client.get("/health")
    except httpx.TransportError:
        return False
    return health.status_code == 200 and health.json().get("workers", 0) >= num_workers
