"""Counts what reading an upload costs, and refuses the one byte or second too many."""

import time
from collections.abc import Callable

from adapters.errors import AdapterTooLarge
from adapters.limits import UploadLimits


class Meter:
    """The costs of one pass over one upload, against its limits.

    packed_bytes   the size of the archive; None for a folder, where there is no ratio to ask for
    """

    def __init__(
        self,
        limits: UploadLimits,
        *,
        packed_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._packed_bytes = packed_bytes
        self._clock = clock
        self._started = clock()
        self._total_bytes = 0
        self._num_members = 0

    def restart_bytes(self) -> None:
        """Begin another pass over the same bytes; the time goes on."""
        self._total_bytes = 0

    def count_member(self) -> None:
        """Count one file or folder, whether or not it is needed."""
        self._num_members += 1
        if self._num_members > self._limits.max_members:
            raise AdapterTooLarge(
                f"the upload has {self._num_members} files and folders or more; at most "
                f"{self._limits.max_members} are read"
            )
        self.check_time()

    def count(self, num_bytes: int) -> None:
        """Count bytes that were unpacked or copied."""
        self._total_bytes += num_bytes
        limits = self._limits
        if self._total_bytes > limits.max_total_bytes:
            raise AdapterTooLarge(
                f"the upload unpacks to {self._total_bytes} bytes or more; at most "
                f"{limits.max_total_bytes} bytes are taken"
            )
        if self._packed_bytes is not None:
            self._check_ratio(max(1, self._packed_bytes))
        self.check_time()

    def check_time(self) -> None:
        """Raise when reading has taken too long."""
        passed_s = self._clock() - self._started
        if passed_s > self._limits.max_unpack_s:
            raise AdapterTooLarge(
                f"reading the upload has taken {passed_s:.0f} seconds; at most "
                f"{self._limits.max_unpack_s:g} are spent on one"
            )

    def _check_ratio(self, packed_bytes: int) -> None:
        limits = self._limits
        ratio_bytes = max(limits.ratio_free_bytes, packed_bytes * limits.max_ratio)
        if self._total_bytes > ratio_bytes:
            raise AdapterTooLarge(
                f"the archive of {packed_bytes} bytes unpacks to {self._total_bytes} bytes or "
                f"more, and at most {ratio_bytes} are unpacked ({limits.max_ratio} times its "
                "size): it looks like a decompression bomb"
            )
