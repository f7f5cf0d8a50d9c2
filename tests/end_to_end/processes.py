"""What the processes of a run are and take, by Linux's /proc."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def children_of(pid: int) -> list[int]:
    """Return direct children, by Linux's /proc."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def descendants_of(pid: int) -> set[int]:
    found: set[int] = set()
    todo = [pid]
    while todo:
        children = children_of(todo.pop())
        found.update(children)
        todo += children
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_gone(pid: int) -> bool:
    return command_of(pid) == ""


MAX_POINTS = 500  # of a slope


class Memory:
    """Resident bytes of some processes over time; Linux only."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._samples: dict[str, list[int]] = {name: [] for name in pids}

    def sample(self) -> None:
        for name, pid in self._pids.items():
            num_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            self._samples[name].append(num_pages * os.sysconf("SC_PAGE_SIZE"))

    def slopes(self, *, settled_after: float) -> dict[str, float]:
        """Bytes gained per sample, once that share of the samples is over."""
        return {
            name: slope_of(samples[int(len(samples) * settled_after) :])
            for name, samples in self._samples.items()
        }


def slope_of(samples: Sequence[int]) -> float:
    """Return the median of the slopes between all pairs of points (Theil and Sen).

    An allocator that takes some megabytes more, once, is not a slope; what grows with every sample
    is, in however large steps.
    """
    places = np.linspace(0, len(samples) - 1, num=min(len(samples), MAX_POINTS), dtype=int)
    points = np.array(samples, dtype=float)[places]
    first, second = np.triu_indices(len(places), k=1)
    return float(np.median((points[second] - points[first]) / (places[second] - places[first])))
