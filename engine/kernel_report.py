"""`python -m engine.kernel_report`: which kernels a core started like this would take, as JSON."""

import json
import os
import sys

from engine.model.kernel_choice import choose_kernels, openmp_runtimes


def main() -> None:
    """Write one line: kernels, reason, openmp (the runtimes that are mapped)."""
    choice = choose_kernels("auto", num_threads=os.cpu_count() or 1)
    runtimes = sorted(path.name for path in openmp_runtimes()) if sys.platform == "linux" else []
    line = {"kernels": choice.name, "reason": choice.reason, "openmp": runtimes}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
