"""A tensor's memory as numpy sees it."""

from typing import Any

import numpy as np
import torch

Words = np.ndarray[Any, Any]
PAIRS = np.uint32  # as the dtype of a view of bf16 words: two of a row side by side


def words(tensor: torch.Tensor) -> Words:
    """Return the tensor's own memory, without a copy: bf16 as uint16, anything else as it is."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()
