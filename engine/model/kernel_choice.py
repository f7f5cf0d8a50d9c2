"""Which kernels a decoder runs on, and why; decided once, at start."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import torch  # its OpenMP runtime is what numba's is compared with

from engine.errors import InvalidModel
from engine.model.attention_choice import AttentionChoice, expected_attention
from engine.model.rotary import RotaryTable
from engine.model.spec import ModelSpec
from engine.model.step_kernels import PlainKernels, StepKernels
from punica_kernels.flashinfer_attention import FlashInferAttention

KernelFactory = Callable[[ModelSpec, RotaryTable], StepKernels]

_OLDEST_MAJOR = 8  # of compute capability: bf16 on tensor cores
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """What was chosen.

    name     "numba", "triton" or "torch"
    reason   in words, for a person
    """

    name: str
    reason: str
    factory: KernelFactory


def choose_kernels(
    asked: str,
    *,
    num_threads: int,
    device: torch.device = _CPU,
    choose_attention: Callable[[], AttentionChoice] | None = None,
) -> KernelChoice:
    """Choose for one device: "auto" takes numba on a CPU and Triton on CUDA.

    It takes plain torch where that one can't run, or on a CPU not well. Raises InvalidModel in
    words if it was asked for by its name and can't be had.

    choose_attention   says whose attention Triton's kernels go with, and is asked only if they are
                       taken; None: their own, for want of a model
    """
    if asked == "torch":
        return KernelChoice(name="torch", reason="asked for", factory=PlainKernels)
    best = "triton" if device.type == "cuda" else "numba"
    wanted = best if asked == "auto" else asked
    problem = triton_problem(device) if wanted == "triton" else numba_problem(device)
    if problem is None:
        if wanted == "numba":
            return _numba_choice(num_threads)
        return _triton_choice(
            expected_attention(device.type) if choose_attention is None else choose_attention()
        )
    if asked != "auto":
        raise InvalidModel(f"the {asked} kernels can't run here: {problem}")
    return KernelChoice(name="torch", reason=problem, factory=PlainKernels)


def triton_problem(device: torch.device) -> str | None:
    """Say in words what keeps the Triton kernels from running on this device; None: nothing."""
    try:
        triton = import_module("triton")
    except ImportError:
        return "triton isn't installed"
    if device.type == "cpu":
        is_interpreted = bool(triton.knobs.runtime.interpret)
        return None if is_interpreted else "on a CPU Triton has only its interpreter, for tests"
    capability = torch.cuda.get_device_capability(device)
    if capability < (_OLDEST_MAJOR, 0):
        found = ".".join(map(str, capability))
        wanted = f"{_OLDEST_MAJOR}.0 or later"
        return f"Triton's kernels want compute capability {wanted}; this device has {found}"
    return None


def numba_problem(device: torch.device) -> str | None:
    """Say in words what keeps the numba kernels from running well in this process; None: nothing.

    Two OpenMP runtimes in one process fight for the cores, so that a step takes many times as long
    as with plain torch kernels.
    """
    if device.type != "cpu":
        return "they run on CPUs only"
    if sys.platform != "linux":
        return "only on Linux is one OpenMP runtime arranged for torch and numba"
    try:
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


def _numba_choice(num_threads: int) -> KernelChoice:
    from punica_kernels import numba_dots

    problem = numba_dots.problem()
    whose = "ours" if problem is None else f"the matrix library's ({problem})"
    return KernelChoice(
        name="numba",
        reason=f"numba and torch share one OpenMP runtime; bf16 products: {whose}",
        factory=lambda spec, rotary: _numba(spec, rotary, num_threads=num_threads),
    )


def _triton_choice(attention: AttentionChoice) -> KernelChoice:
    return KernelChoice(
        name="triton",
        reason=f"Triton can run here; {attention.reason}",
        factory=partial(_triton, flashinfer=attention.flashinfer),
    )


def _triton(
    spec: ModelSpec, rotary: RotaryTable, *, flashinfer: FlashInferAttention | None
) -> StepKernels:
    from engine.model.triton_kernels import TritonKernels

    return TritonKernels(spec, rotary, flashinfer=flashinfer)


def _numba(spec: ModelSpec, rotary: RotaryTable, *, num_threads: int) -> StepKernels:
    import numba

    from engine.model.cpu_kernels import NumbaKernels

    num_threads = min(num_threads, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(num_threads)
    return NumbaKernels(spec, rotary, num_threads=num_threads)
