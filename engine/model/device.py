"""The device that a model runs on: whether it is here, and how small lists get there."""

from collections.abc import Sequence

import torch

from engine.device_share import DeviceShare
from engine.errors import InvalidModel
from engine.transfer import upload


def open_device(name: str, *, worker_index: int = 0, num_workers: int = 1) -> torch.device:
    """Return the device "cpu" or "cuda" of one worker; raises InvalidModel if it isn't here.

    A CUDA device becomes the current one of this thread: kernels are launched on that.
    """
    if name == "cpu":
        return torch.device("cpu")
    problem = cuda_problem()
    if problem is not None:
        raise InvalidModel(f"there is no device {name!r} here: {problem}")
    share = device_share(worker_index, num_workers=num_workers)
    torch.cuda.set_device(share.index)
    return torch.device(name, share.index)


def device_share(worker_index: int, *, num_workers: int) -> DeviceShare:
    """Return a worker's place on the CUDA devices that are here."""
    num_devices = torch.cuda.device_count()
    return DeviceShare.of(worker_index, num_workers=num_workers, num_devices=num_devices)


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
