"""Which device a worker of several runs on, and how much of its memory is the worker's."""

from dataclasses import dataclass
from typing import Self

SHARE = 0.90  # of what is free; the rest is for graphs, and for what the allocator can't use


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """A worker's place among the workers of one machine, which start one after the other.

    index       of the device, among those that are visible
    num_later   workers that will be started on the same device after this one
    """

    index: int
    num_later: int

    @classmethod
    def of(cls, worker_index: int, *, num_workers: int, num_devices: int) -> Self:
        """Deal the workers over the devices in turn."""
        later = range(worker_index + num_devices, num_workers, num_devices)
        return cls(index=worker_index % num_devices, num_later=len(later))

    def budget_bytes(self, *, num_free_bytes: int, weight_bytes: int) -> int:
        """Return what KV blocks and rank rows may take of `num_free_bytes`.

        num_free_bytes  of the device, with this worker's weights in place
        weight_bytes    of one worker; the later ones will need as many each
        """
        spare_bytes = max(num_free_bytes - self.num_later * weight_bytes, 0)
        return int(spare_bytes * SHARE) // (self.num_later + 1)
