"""These tests run in a process of their own: in Triton's interpreter, or on a CUDA device.

The interpreter must be chosen before the first kernel is imported, so the ordinary run leaves this
folder alone and starts `TRITON_INTERPRET=1 pytest` on it instead (test_in_the_interpreter.py).
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
