"""Checks and measures the Triton back end on a CUDA device; benchmarks/device.sh starts it."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.device_checks import check_kernels
from benchmarks.device_engine import decode_overhead, grade_e2, lines_of, load_figures
from benchmarks.device_flashinfer import compare_attention
from benchmarks.device_kernels import copy_bandwidth, kernel_figures
from benchmarks.device_world import World


def main() -> int:
    """Run the sections that were asked for, print them as they come, write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny shapes in Triton's interpreter")
    parser.add_argument("--json", type=Path, help="where to write the results")
    sections = {
        "checks": _checks,
        "e2": _e2,
        "kernels": _kernels,
        "decode": lambda world: {"decode": decode_overhead(world)},
        "loads": lambda world: {"loads": load_figures(world)},
        "flashinfer": compare_attention,  # the last, since it may be compiled first
    }
    parser.add_argument("--sections", nargs="+", choices=list(sections), default=list(sections))
    options = parser.parse_args()
    world = _world(dry=options.dry)
    results: dict[str, object] = _provenance(world)
    print("  ".join(f"{key} {value}" for key, value in results.items()))
    passed = True
    for name in options.sections:
        passed &= _run(name, sections[name], world, results)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if passed else 1


def _world(*, dry: bool) -> World:
    if dry:
        assert os.environ.get("TRITON_INTERPRET") == "1", "the dry mode needs TRITON_INTERPRET=1"
        torch.set_num_threads(1)
        return World(device=torch.device("cpu"), dry=True)
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here; --dry shows that everything starts")
    return World(device=torch.device("cuda"), dry=False)


def _run(
    name: str,
    section: Callable[[World], dict[str, object]],
    world: World,
    results: dict[str, object],
) -> bool:
    """Run one section; a failure of it is written down and doesn't keep the others from running."""
    start = time.perf_counter()
    torch.manual_seed(0)
    try:
        found = section(world)
    except Exception as error:  # noqa: BLE001 - device time is dear: the other sections still run
        found = {name: [], f"{name}_error": repr(error)[:2000]}
    results |= found
    print(f"\n{name} ({time.perf_counter() - start:.1f} s)")
    for key, value in found.items():
        if isinstance(value, list):
            print("\n".join(lines_of(value)))
        else:
            print(f"{key}: {value}")
    sys.stdout.flush()
    return f"{name}_error" not in found and found.get(f"{name}_passed", True) is True


def _checks(world: World) -> dict[str, object]:
    checks = check_kernels(world)
    return {"checks": checks, "checks_passed": all(line["passed"] for line in checks)}


def _e2(world: World) -> dict[str, object]:
    grade = grade_e2(world)
    return {"e2": [grade], "e2_passed": grade["unexcused"] == 0}


def _kernels(world: World) -> dict[str, object]:
    peak = copy_bandwidth(world)
    figures = kernel_figures(world)
    for line in figures:
        line["of_copy"] = float(str(line["bytes_per_s"])) / peak
    return {"copy_bytes_per_s": peak, "kernels": figures}


def _provenance(world: World) -> dict[str, object]:
    import triton

    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    on_cuda = world.device.type == "cuda"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": described.stdout.strip() or "unknown",
        "device": torch.cuda.get_device_name() if on_cuda else f"interpreter, {platform.machine()}",
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
