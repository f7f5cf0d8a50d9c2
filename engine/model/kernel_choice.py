"""Which kernels a decoder runs on, and why; decided once, at start."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from engine.errors import InvalidModel
from engine.model.rotary import RotaryTable
from engine.model.spec import ModelSpec
from engine.model.step_kernels import PlainKernels, StepKernels

KernelFactory = Callable[[ModelSpec, RotaryTable], StepKernels]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """What was chosen.

    name     "numba" or "torch"
    reason   in words, for a person
    """

    name: str
    reason: str
    factory: KernelFactory


def choose_kernels(asked: str, *, num_threads: int) -> KernelChoice:
    """Choose for a CPU: "auto" takes numba where it shares torch's OpenMP runtime.

    Raises InvalidModel in words if "numba" was asked for and can't be had.
    """
    if asked == "torch":
        return KernelChoice(name="torch", reason="asked for", factory=PlainKernels)
    problem = numba_problem()
    if problem is None:
        return KernelChoice(
            name="numba",
            reason="numba and torch share one OpenMP runtime",
            factory=lambda spec, rotary: _numba(spec, rotary, num_threads=num_threads),
        )
    if asked == "numba":
        raise InvalidModel(f"the numba kernels can't run here: {problem}")
    return KernelChoice(name="torch", reason=problem, factory=PlainKernels)


def numba_problem() -> str | None:
    """Say in words what keeps the numba kernels from running well in this process; None: nothing.

    Two OpenMP runtimes in one process fight for the cores, so that a step takes many times as long
    as with plain torch kernels.
    """
    if sys.platform != "linux":
        return "only on Linux is one OpenMP runtime arranged for torch and numba"
    try:
        import_module("torch")  # its runtime is what is looked for
        import_module("numba.np.ufunc.omppool")  # loads numba's
    except ImportError as error:
        return f"numba's OpenMP layer can't be loaded ({error.name or 'unknown module'})"
    found = openmp_runtimes()
    if len(found) != 1:
        names = ", ".join(sorted(path.name for path in found)) or "none"
        return f"torch and numba don't share one OpenMP runtime (found: {names})"
    import numba

    if numba.config.THREADING_LAYER != "omp":
        return "numba's threading layer is not omp; set NUMBA_THREADING_LAYER=omp"
    return None


def openmp_runtimes() -> set[Path]:
    """Return the OpenMP runtimes that are mapped into this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in maps if len(line.split(maxsplit=5)) == 6}
    return {path for path in paths if path.name.startswith(("libgomp", "libomp.", "libiomp5"))}


def _numba(spec: ModelSpec, rotary: RotaryTable, *, num_threads: int) -> StepKernels:
    import numba

    from engine.model.cpu_kernels import NumbaKernels

    num_threads = min(num_threads, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(num_threads)
    return NumbaKernels(spec, rotary, num_threads=num_threads)
