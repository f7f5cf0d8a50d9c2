"""Which worker gets a request: a pure function of what the workers say of themselves."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as this gateway sees it now.

    instance     new with every start of the worker's core; what was loaded before is forgotten
    resident     lora_ids in its arena; disk: lora_ids laid out on its disk
    num_sent     requests of this gateway in flight there, which its heartbeat may not know yet
    is_suspect   the last call to it failed; used only when nobody else is there
    """

    worker_id: str
    address: str
    base_id: str
    base_identity: str
    instance: str
    kind: str = "loraplex"
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    resident: frozenset[str] = field(default_factory=frozenset)
    disk: frozenset[str] = field(default_factory=frozenset)
    num_sent: int = 0
    is_suspect: bool = False

    @property
    def load(self) -> int:
        """Requests it has, by its own count or by ours, whichever is more."""
        return max(self.num_running + self.num_waiting, self.num_sent)

    @property
    def is_busy(self) -> bool:
        """True when a new request would queue there."""
        few_blocks = self.num_blocks > 0 and self.num_free_blocks * 20 < self.num_blocks
        return self.num_waiting > 0 or few_blocks


def choose_worker(
    workers: Sequence[WorkerView],
    *,
    base_id: str,
    lora_id: str | None,
    excluded: Collection[str] = (),
) -> WorkerView | None:
    """Return the worker for one request on `base_id`, or None if none serves that base.

    In falling order: resident and not busy; on its disk and not busy; the version's home, if not
    busy; the least loaded. Suspects come last. For the base itself: the least loaded.
    """
    able = [w for w in workers if w.base_id == base_id and w.worker_id not in excluded]
    candidates = [w for w in able if not w.is_suspect] or able
    if not candidates:
        return None
    ready = [w for w in candidates if not w.is_busy]
    if lora_id is not None and ready:
        resident = [w for w in ready if lora_id in w.resident]
        on_disk = [w for w in ready if lora_id in w.disk]
        if resident or on_disk:
            return _least_loaded(resident or on_disk)
        home = home_worker(candidates, lora_id)
        if home in ready:
            return home
    return _least_loaded(ready or candidates)


def home_worker(workers: Sequence[WorkerView], lora_id: str) -> WorkerView:
    """Return the worker that the rendezvous hash prefers for `lora_id`; `workers` isn't empty."""
    return max(workers, key=lambda w: hashlib.sha256(f"{w.worker_id}|{lora_id}".encode()).digest())


def _least_loaded(workers: Sequence[WorkerView]) -> WorkerView:
    return min(workers, key=lambda w: (w.load, w.worker_id))
