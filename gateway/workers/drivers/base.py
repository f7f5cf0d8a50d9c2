"""What the gateway asks of any kind of worker."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from gateway.tenancy.tenants import Tenant
from gateway.workers.client import WorkerStream
from gateway.workers.placement import WorkerView


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """What a worker found when it ran the base and a version side by side.

    logit_gap   largest difference of two logits, version against base; noise: base against base
    is_finite   no logit of the version is NaN or infinite
    """

    has_effect: bool
    is_finite: bool
    logit_gap: float
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """What is sent to a worker for one request of a client, and for whom.

    public_model   what answers call the model
    """

    method: str
    path: str
    body: bytes
    public_model: str
    tenant: Tenant


class WorkerDriver(ABC):
    """Speaks to the workers of one kind. Holds no opinion on which worker is used."""

    @abstractmethod
    async def ensure_loaded(self, worker: WorkerView, *, lora_id: str, digest: str) -> None:
        """Return once the worker knows the version.

        Concurrent callers share one load; a caller that is cancelled leaves it running for the
        others. Raises WorkerCallFailed or WorkerRefused.
        """

    @abstractmethod
    def forget_loaded(self, worker: WorkerView, *, lora_id: str) -> None:
        """Drop the belief that the worker knows the version; the worker said that it doesn't."""

    @abstractmethod
    async def unload(self, worker: WorkerView, *, lora_id: str) -> None:
        """Ask the worker to forget a version. An unknown one is no error."""

    @abstractmethod
    async def probe(self, worker: WorkerView, *, lora_id: str) -> ProbeAnswer | None:
        """Have the worker compare a loaded version with its base; None if it doesn't know it.

        Raises WorkerCallFailed or GatewayError.
        """

    @abstractmethod
    async def held(self, worker: WorkerView) -> set[str]:
        """Return the lora_ids that requests hold or wait for there at this moment."""

    @abstractmethod
    async def open(self, worker: WorkerView, request: WorkerRequest) -> WorkerStream:
        """Send a request; no other tenant's cached tokens are used. Raises WorkerCallFailed."""
