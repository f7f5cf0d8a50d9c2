"""Claims and leases: what sequences hold on adapters."""

from collections.abc import Iterable

from engine.lora.residency import AdapterResidency, Lease
from engine.sequence import SampleGroup, Sequence


class AdapterHolds:
    """The one place where claims and leases are taken and given back.

    A request with an adapter has a claim while it waits, and a lease from its start to the end of
    its last sample: one, however many samples it has. What is preempted keeps its lease, so that
    an unload or an eviction can't come between. A request that is held back by a closed queue has
    neither: what only such requests want may be evicted.
    """

    def __init__(self, residency: AdapterResidency | None) -> None:
        self._residency = residency
        self._claims: set[SampleGroup] = set()
        self._leases: dict[SampleGroup, Lease] = {}

    def knows(self, lora_id: str) -> bool:
        """Whether a sequence of this adapter may be added."""
        return self._residency is not None and self._residency.knows(lora_id)

    def has_lease(self, seq: Sequence) -> bool:
        """Whether the request of `seq` was admitted with an adapter, and has not ended."""
        return seq.group in self._leases

    def lora_index(self, seq: Sequence) -> int | None:
        """Return the row of the adapter that `seq` leases; None for the base."""
        return None if seq.lora_id is None else self._leases[seq.group].lora_index

    def claim(self, seq: Sequence) -> None:
        """Ask for the adapter of a sequence that waits."""
        if seq.lora_id is None or seq.group in self._claims or seq.group in self._leases:
            return
        assert self._residency is not None
        self._residency.claim(seq.lora_id)
        self._claims.add(seq.group)

    def unclaim(self, seq: Sequence) -> None:
        """Stop asking, if `seq` did."""
        if seq.group in self._claims:
            assert self._residency is not None
            assert seq.lora_id is not None
            self._residency.unclaim(seq.lora_id)
            self._claims.remove(seq.group)

    def can_start(self, seq: Sequence) -> bool:
        """Hold the adapter of `seq` for a start; False if it isn't resident. The claim stays."""
        if seq.lora_id is None or seq.group in self._leases:
            return True
        assert self._residency is not None
        lease = self._residency.lease(seq.lora_id)
        if lease is not None:
            self._leases[seq.group] = lease
        return lease is not None

    def undo_start(self, seq: Sequence) -> None:
        """Give back what can_start took, since there are no blocks; a preempted one keeps it."""
        if seq.group in self._claims:
            self._release(seq)

    def drop(self, seq: Sequence) -> None:
        """Give back whatever the request of `seq` has: its last sample has ended."""
        self.unclaim(seq)
        self._release(seq)

    def check_invariants(self, *, waiting: Iterable[Sequence], started: Iterable[Sequence]) -> None:
        """Check claims and leases against the sequences that may have them."""
        running = {seq.group for seq in started if seq.lora_id is not None}
        assert running <= self._leases.keys(), "a sequence runs without its lease"
        queued = {seq.group for seq in waiting if seq.lora_id is not None}
        assert self._claims <= queued, "a claim without a waiting sequence"
        assert self._leases.keys() <= running | queued, "a lease without a sequence"
        assert not self._claims & self._leases.keys(), "a claim beside a lease"

    def _release(self, seq: Sequence) -> None:
        lease = self._leases.pop(seq.group, None)
        if lease is not None:
            assert self._residency is not None
            self._residency.release(lease)
