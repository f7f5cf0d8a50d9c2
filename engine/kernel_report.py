"""`python -m engine.kernel_report`: which kernels a core started like this would take, as JSON."""

import json
import os
import sys
from importlib import import_module

import torch

from engine.model.kernel_choice import choose_kernels, openmp_runtimes

_GIB = 1 << 30


def main() -> None:
    """Write one line: kernels, reason, openmp (the runtimes that are mapped), for the CPU.

    Where torch finds CUDA, devices has each one's name, kernels and text. Elsewhere nothing is
    asked of CUDA but whether it is here.
    """
    choice = choose_kernels("auto", num_threads=os.cpu_count() or 1)
    runtimes = sorted(path.name for path in openmp_runtimes()) if sys.platform == "linux" else []
    line: dict[str, object] = {
        "kernels": choice.name,
        "reason": choice.reason,
        "openmp": runtimes,
    }
    if torch.cuda.is_available():
        line["devices"] = [_device_entry(index) for index in range(torch.cuda.device_count())]
    sys.stdout.write(json.dumps(line) + "\n")


def _device_entry(index: int) -> dict[str, str | None]:
    """Say what a device is and what would run there; kernels is None if it can't be used."""
    device = torch.device("cuda", index)
    try:
        with torch.cuda.device(index):
            hardware = _hardware(device)
            choice = choose_kernels("auto", num_threads=1, device=device)
    except RuntimeError as error:  # taken by another process, full, or broken
        first_line = (str(error).splitlines() or [""])[0]
        text = f"it can't be used ({type(error).__name__}: {first_line})"
        return {"name": str(device), "kernels": None, "text": text}
    text = f"{hardware}, {_triton()}; kernels: {choice.name} ({choice.reason})"
    return {"name": str(device), "kernels": choice.name, "text": text}


def _hardware(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device)
    major, minor = torch.cuda.get_device_capability(device)
    num_free_bytes, num_bytes = torch.cuda.mem_get_info(device)
    memory = f"{num_free_bytes / _GIB:.1f} of {num_bytes / _GIB:.1f} GiB free"
    return f"{name}, compute capability {major}.{minor}, {memory}"


def _triton() -> str:
    try:
        return f"Triton {import_module('triton').__version__}"
    except ImportError:
        return "Triton can't be imported"


if __name__ == "__main__":
    main()
