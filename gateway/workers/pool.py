"""Who is there: the last heartbeats, and what this gateway has learnt by calling."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from adapters.heartbeat import WorkerHeartbeat
from gateway.workers.placement import WorkerView, choose_worker

SUSPECT_S = 2.0


class WorkerPool:
    """The workers of this cluster as of the last heartbeats that were read.

    `update` is the only writer of the heartbeats, `sending` of the counts, `suspect` of the
    doubts. While Redis is away nobody calls `update`, so the last known workers stay.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heartbeats: dict[str, WorkerHeartbeat] = {}
        self._num_sent: Counter[str] = Counter()
        self._suspect_until: dict[str, float] = {}
        self._changed = asyncio.Event()

    def update(self, heartbeats: Sequence[WorkerHeartbeat]) -> None:
        """Take these as all the workers there are, and wake those who wait for one."""
        before, self._heartbeats = self._heartbeats, {h.worker_id: h for h in heartbeats}
        self._suspect_until = {
            worker_id: until
            for worker_id, until in self._suspect_until.items()
            if until > self._clock()
            and _is_same_start(before.get(worker_id), self._heartbeats.get(worker_id))
        }
        self._changed.set()
        self._changed = asyncio.Event()

    def suspect(self, worker_id: str) -> None:
        """Prefer other workers for a moment; a call to this one has just failed."""
        self._suspect_until[worker_id] = self._clock() + SUSPECT_S

    def views(self) -> tuple[WorkerView, ...]:
        """Return all workers as they look now."""
        return tuple(self._view(heartbeat) for heartbeat in self._heartbeats.values())

    @contextmanager
    def sending(self, worker_id: str) -> Iterator[None]:
        """Count one request of this gateway as being there, for as long as the block lasts."""
        self._num_sent[worker_id] += 1
        try:
            yield
        finally:
            self._num_sent[worker_id] -= 1
            if not self._num_sent[worker_id]:
                del self._num_sent[worker_id]

    async def choose(
        self,
        *,
        base_id: str,
        lora_id: str | None,
        excluded: Collection[str] = (),
        wait_s: float = 0.0,
    ) -> WorkerView | None:
        """Choose a worker, waiting up to `wait_s` for one that isn't suspect to be there."""
        deadline = self._clock() + wait_s
        while True:
            changed = self._changed
            worker = choose_worker(
                self.views(), base_id=base_id, lora_id=lora_id, excluded=excluded
            )
            rest_s = deadline - self._clock()
            if rest_s <= 0 or (worker is not None and not worker.is_suspect):
                return worker
            try:
                async with asyncio.timeout(rest_s):
                    await changed.wait()
            except TimeoutError:
                return worker

    def check_invariants(self) -> None:
        assert all(count > 0 for count in self._num_sent.values()), "a count was not taken back"

    def _view(self, heartbeat: WorkerHeartbeat) -> WorkerView:
        worker_id = heartbeat.worker_id
        return WorkerView(
            worker_id=worker_id,
            address=heartbeat.address,
            base_id=heartbeat.base_id,
            base_identity=heartbeat.base_identity,
            instance=heartbeat.instance,
            kind=heartbeat.kind,
            num_running=heartbeat.num_running,
            num_waiting=heartbeat.num_waiting,
            num_free_blocks=heartbeat.num_free_blocks,
            num_blocks=heartbeat.num_blocks,
            resident=frozenset(heartbeat.resident),
            disk=frozenset(heartbeat.disk),
            num_sent=self._num_sent[worker_id],
            is_suspect=self._suspect_until.get(worker_id, 0.0) > self._clock(),
        )


def _is_same_start(before: WorkerHeartbeat | None, now: WorkerHeartbeat | None) -> bool:
    """Tell whether both are of one run of a worker; a new run owes nothing to the old one."""
    if before is None or now is None:
        return False
    return (before.address, before.instance) == (now.address, now.instance)
