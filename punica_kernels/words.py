"""A tensor's memory as numpy sees it."""

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor, and its memory as kernels read it: looking that up costs microseconds each time.

    pairs  the words two by two, where they are of bf16 and rows are even; else the words
    """

    tensor: torch.Tensor
    words: Words
    pairs: Words


def seen(tensor: torch.Tensor) -> Seen:
    """Look a contiguous tensor's memory up."""
    found = words(tensor)
    in_pairs = found.dtype == np.uint16 and found.shape[-1] % 2 == 0
    return Seen(tensor, found, found.view(PAIRS) if in_pairs else found)
