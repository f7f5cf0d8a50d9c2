"""Large tensors of zeros that take memory only where they are written."""

import numpy as np
import torch
from torch import Tensor


def lazy_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros whose pages are committed at first write, where the device allows it.

    torch.zeros writes every page (seconds, and all of the memory at once); numpy's zeros are the
    operating system's own zero pages.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    words = {2: np.uint16, 4: np.uint32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, dtype=words)).view(dtype)
