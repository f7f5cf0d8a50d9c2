"""Compiles one function twice: with its prange divided among threads, and as a plain loop."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from numba import njit

from punica_kernels.numba_floats import FAST_SUMS


def in_parallel(function: Callable[..., None]) -> Any:
    """Return the kernel that divides the function's prange among numba's threads."""
    return njit(parallel=True, fastmath=FAST_SUMS, cache=True)(_under(function, "in_parallel"))


def serially(function: Callable[..., None]) -> Any:
    """Return the kernel that runs in the caller's thread, for work too small to divide."""
    return njit(fastmath=FAST_SUMS, cache=True)(_under(function, "serially"))


def _under(function: Callable[..., None], suffix: str) -> FunctionType:
    """Return a copy of the function under a name of its own.

    numba's cache on disk knows a kernel by its function's name and line, not by how it was
    compiled: two kernels of one function would be read as whichever was written first.
    """
    assert isinstance(function, FunctionType), "kernels are plain functions"
    name = f"{function.__name__}_{suffix}"
    copy = FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
    copy.__qualname__ = name
    copy.__doc__ = function.__doc__
    return copy
