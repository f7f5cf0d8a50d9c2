"""The way of small tensors to the device that a step computes on, and back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(numbers: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers, or rows of them, as a tensor on `device`; the host doesn't wait for it."""
    tensor = torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda" and tensor.numel():
        tensor = tensor.pin_memory()  # from other memory CUDA copies while the host waits
    return tensor.to(device, non_blocking=True)


def download(tensors: Sequence[Tensor]) -> list[Any]:
    """Return each of `tensors`, all of one dtype and device, as lists of numbers in its shape.

    They come in one copy, and that is the one time that the host waits.
    """
    if not tensors:
        return []
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(one.shape).tolist() for part, one in zip(parts, tensors, strict=True)]
