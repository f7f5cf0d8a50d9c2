"""Everything that a route may use, made once in `app.lifespan`."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import cast

from anyio import to_thread
from starlette.requests import Request

from adapters.redis_connection import connect
from adapters.registry import AdapterRegistry
from adapters.store import AdapterStore
from gateway.background import Background
from gateway.dispatch import Dispatcher
from gateway.idempotency import IdempotencyKeys
from gateway.metrics import GatewayMetrics
from gateway.probing import VersionProber
from gateway.pruning import Pruner
from gateway.publishing import Publisher
from gateway.registry_reader import RegistryReader
from gateway.settings import GatewaySettings
from gateway.upkeep import Upkeep
from gateway.uploads import UploadDesk
from gateway.workers.client import WorkerClient
from gateway.workers.drivers.base import WorkerDriver
from gateway.workers.drivers.loraplex import LoraplexDriver
from gateway.workers.pool import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts of one gateway process."""

    settings: GatewaySettings
    reader: RegistryReader
    publisher: Publisher
    pruner: Pruner
    uploads: UploadDesk
    idempotency: IdempotencyKeys
    pool: WorkerPool
    client: WorkerClient
    drivers: dict[str, WorkerDriver]
    dispatcher: Dispatcher
    metrics: GatewayMetrics
    background: Background
    clock: Callable[[], float]


@asynccontextmanager
async def running_gateway(
    settings: GatewaySettings, *, metrics: GatewayMetrics, clock: Callable[[], float]
) -> AsyncIterator[Gateway]:
    """Open everything, yield the gateway, and close it all in the opposite order.

    Raises RegistryBroken when Redis can't be reached at the start: that is the operator's to see.
    """
    async with AsyncExitStack() as opened:
        redis = connect(settings.redis_url)
        opened.push_async_callback(redis.aclose)
        store = await to_thread.run_sync(AdapterStore, settings.store_dir.resolve())
        journal = store.journal()
        registry = AdapterRegistry(redis, journal=journal, cluster_token=settings.cluster_token)
        pool = WorkerPool(clock=clock)
        reader = RegistryReader(registry, pool=pool, metrics=metrics, clock=clock)
        client = await opened.enter_async_context(
            WorkerClient(cluster_token=settings.cluster_token, silence_s=settings.worker_silence_s)
        )
        driver = LoraplexDriver(
            client, path_of=store.path_of, load_timeout_s=settings.load_timeout_s
        )
        opened.push_async_callback(driver.aclose)
        drivers: dict[str, WorkerDriver] = {"loraplex": driver}
        background = Background()
        opened.push_async_callback(background.aclose)
        pruner = Pruner(
            store=store, registry=registry, pool=pool, drivers=drivers, background=background
        )
        prober = VersionProber(
            registry=registry, reader=reader, pool=pool, drivers=drivers, pruner=pruner
        )
        opened.push_async_callback(prober.aclose)
        upkeep = Upkeep(
            registry=registry, reader=reader, store=store, journal=journal, prober=prober
        )
        await upkeep.begin()
        background.start(upkeep.run(interval_s=settings.snapshot_interval_s), name="upkeep")
        yield Gateway(
            settings=settings,
            reader=reader,
            publisher=Publisher(store=store, registry=registry, reader=reader, prober=prober),
            pruner=pruner,
            uploads=UploadDesk(store=store, settings=settings),
            idempotency=IdempotencyKeys(redis),
            pool=pool,
            client=client,
            drivers=drivers,
            dispatcher=Dispatcher(
                pool=pool,
                drivers=drivers,
                metrics=metrics,
                worker_wait_s=settings.worker_wait_s,
            ),
            metrics=metrics,
            background=background,
            clock=clock,
        )


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves `request`."""
    return cast("Gateway", request.state.gateway)
