"""The environment that a core's process is started in: one OpenMP runtime, and how it waits.

torch and numba each bring a thread pool. Two pools that spin on the same cores take each other's
time, so both are made to find torch's own libgomp; only whoever starts the process can do that.
"""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# How long an idle thread of the matrix library spins before it sleeps. The runtime's own default,
# a spin of many milliseconds, is for machines that do nothing else: beside a server, a gateway and
# a client on the same cores, the spinning threads take the time of those that have work.
SPIN_COUNT = "2000"
# What torch is linked to, and what numba's OpenMP layer asks for.
RUNTIME_NAMES = ("libgomp.so.1", "libgomp.so.1.0.0")
# Weights are read whole in every step: fewer, larger pages. What a step works in is as large as a
# few megabytes and is wanted again in the next: not given back, so not faulted in again.
MALLOC = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        f"glibc.malloc.mmap_threshold={32 * 1024**2}",
        f"glibc.malloc.trim_threshold={256 * 1024**2}",
    )
)


def core_environment(state_dir: Path) -> dict[str, str]:
    """Return this process's environment, changed for a core; what the operator has set stays.

    Links to torch's OpenMP runtime are made in `state_dir`, and numba's compiled kernels are kept
    there. Where torch brings no libgomp (macOS, system builds) nothing is linked.
    """
    environment = {**os.environ}
    if not environment.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
    environment.setdefault("GLIBC_TUNABLES", MALLOC)
    environment.setdefault("NUMBA_CACHE_DIR", str(state_dir / "numba" / _kernels_digest()))
    runtime = _torch_runtime()
    if runtime is not None:
        links = _link(runtime, state_dir / "openmp")
        others = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = f"{links}:{others}" if others else str(links)
        environment.setdefault("NUMBA_THREADING_LAYER", "omp")
    return environment


def become(arguments: Sequence[str], state_dir: Path, **variables: str) -> NoReturn:
    """Replace this process by Python with `arguments`, in a core's environment and `variables`.

    Which OpenMP runtime a process maps is settled before its first line of Python.
    """
    environment = core_environment(state_dir) | variables
    os.execve(sys.executable, [sys.executable, *arguments], environment)


def _kernels_digest() -> str:
    """Return a digest of the kernels' sources.

    numba compiles anew when the file of a kernel has changed, but not when another has from which
    the kernel takes its inner loops; so each state of the sources has a cache of its own.
    """
    digest = hashlib.sha256()
    spec = importlib.util.find_spec("punica_kernels")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for source in sorted(Path(place).glob("numba_*.py")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _torch_runtime() -> Path | None:
    """Find torch's libgomp without importing torch."""
    spec = importlib.util.find_spec("torch")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        runtime = Path(place) / "lib" / RUNTIME_NAMES[0]
        if runtime.is_file():
            return runtime.resolve()
    return None


def _link(runtime: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in RUNTIME_NAMES:
        link = folder / name
        if not link.is_symlink() or link.resolve() != runtime:
            fresh = folder / f".{name}.{os.getpid()}"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(runtime)
            fresh.replace(link)
    return folder
