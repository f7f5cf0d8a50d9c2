"""Two kernels of one function are two entries of numba's cache on disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # compiles

KERNELS = """
import numpy as np
from punica_kernels import numba_rows
x, weight, out = np.ones((4, 8)), np.ones(8), np.zeros((4, 8))
for kernel in numba_rows.rms_norm, numba_rows.rms_norm_serially:
    kernel(x, weight, np.float32(1e-5), out)
    print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
"""


def test_a_kernel_is_never_read_as_its_twin(tmp_path: Path):
    """The twin would hit what the first kernel has just written."""
    command = [sys.executable, "-c", KERNELS]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    hits_and_misses = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        hits_and_misses += done.stdout.split("\n")[:2]
    assert hits_and_misses == ["0 1", "0 1", "1 0", "1 0"]
    assert len(list(tmp_path.rglob("*.nbi"))) == 2
