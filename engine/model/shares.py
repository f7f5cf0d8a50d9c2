"""How work is shared out among threads beforehand."""

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def balanced_starts(costs: Array, num_threads: int) -> Array:
    """Return the starts of consecutive runs of about equal cost, and the end of the last.

    At most num_threads runs, and none for no costs.
    """
    if len(costs) == 0:
        return np.zeros(1, dtype=np.int64)
    num_parts = min(num_threads, len(costs))
    before = np.concatenate(([0], np.cumsum(costs)))
    wanted = before[-1] * np.arange(1, num_parts) / num_parts
    cuts = np.abs(before[:, None] - wanted).argmin(axis=0)
    return np.concatenate(([0], np.maximum.accumulate(cuts), [len(costs)])).astype(np.int64)


def even_cuts(length: int, num_parts: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of parts of `length` whose sizes differ by one at most."""
    for part in range(num_parts):
        yield length * part // num_parts, length * (part + 1) // num_parts
