"""The device that a model runs on: whether it is here, and how small lists get there."""

from collections.abc import Sequence

import torch

from engine.errors import InvalidModel
from engine.transfer import upload


def open_device(name: str) -> torch.device:
    """Return the device "cpu" or "cuda"; raises InvalidModel in one line if it isn't here."""
    if name == "cpu":
        return torch.device("cpu")
    problem = cuda_problem()
    if problem is not None:
        raise InvalidModel(f"there is no device {name!r} here: {problem}")
    return torch.device(name, 0)


def cuda_problem() -> str | None:
    """Say in words what keeps CUDA from being used; None: nothing. Called only if built in."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA; install one that has it"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device; look at the driver and at CUDA_VISIBLE_DEVICES"
    return None


def integers_on(device: torch.device, values: Sequence[int]) -> torch.Tensor:
    """Return `values` as [len(values)] int64 on `device`; the host doesn't wait for the copy."""
    return upload(values, dtype=torch.int64, device=device)
