"""What the routes of one worker share."""

from dataclasses import dataclass, field

from starlette.requests import Request

from engine.server.core_supervisor import CoreSupervisor, RunningCore
from engine.server.identifiers import unix_time_s
from engine.server.metrics import Metrics
from engine.server.settings import WorkerSettings


@dataclass(slots=True, kw_only=True)
class Worker:
    """One base model behind one address. `is_draining` is set once, by whoever shuts down."""

    settings: WorkerSettings
    supervisor: CoreSupervisor
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=unix_time_s)
    is_draining: bool = False

    @property
    def core(self) -> RunningCore:
        """The core that serves now; raises CoreBroken while there is none."""
        return self.supervisor.running


def worker_of(request: Request) -> Worker:
    """The worker that a request has reached."""
    worker = request.app.state.worker
    assert isinstance(worker, Worker)
    return worker
