"""Whether a pair of factors adds anything: the norm of B·A, without computing B·A."""

from typing import Any

import numpy as np

from adapters.peft_format import ModuleLora, TensorRef

# In fp64, what cancels exactly leaves rounding errors well below this, relative to its terms.
_CANCELLED = 1e-12


def adds_nothing(lora: ModuleLora) -> bool:
    """Tell whether ‖B·A‖ is zero: the module's output is the base's, whatever comes in.

    B·(A·z) for one z of random numbers is zero only if B·A is, but for a chance of nothing. Values
    must be finite. Reads both tensors once.
    """
    a, b = _read(lora.a), _read(lora.b)
    z = np.random.default_rng(0).standard_normal(a.shape[1])
    v = a @ z  # [rank]
    terms = np.abs(b) @ np.abs(v)  # [out]: how large each sum's terms are together
    largest = float(terms.max(initial=0.0))
    return largest == 0.0 or float(np.abs(b @ v).max()) <= _CANCELLED * largest


def _read(tensor: TensorRef) -> np.ndarray[Any, np.dtype[np.float64]]:
    words = tensor.read()
    if tensor.dtype == "BF16":
        words = (words.astype(np.uint32) << 16).view(np.float32)
    return words.astype(np.float64)
