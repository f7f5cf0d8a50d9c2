"""Row-wise CPU kernels: RMS norm and SwiGLU's product, one pass over each row."""

from typing import Any

import numpy as np
from numba import prange
from numba.extending import overload

from punica_kernels.numba_both import in_parallel, serially
from punica_kernels.numba_floats import FAST_SUMS, exp, narrow, widen


def _rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """out[t] = round(x[t] / rms(x[t])) * weight, the first factor in fp32.

    x, out  [num_tokens, hidden], weight [hidden]; all in one format
    eps     float32
    """
    for t in prange(x.shape[0]):
        _norm_row(x, t, weight, eps, out)


def _add_rms_norm(residual: Any, y: Any, weight: Any, eps: Any, out: Any) -> None:
    """residual[t] = round(residual[t] + y[t]); then out is its norm, as above."""
    for t in prange(residual.shape[0]):
        total, added = residual[t], y[t]
        for i in range(residual.shape[1]):
            total[i] = narrow(widen(total[i]) + widen(added[i]), residual)
        _norm_row(residual, t, weight, eps, out)


def _norm_row(*_arguments: Any) -> None:
    raise NotImplementedError("runs in numba kernels only")


@overload(_norm_row, jit_options={"fastmath": FAST_SUMS})
def _norm_row_in_kernel(x, t, weight, eps, out):
    def norm_row(x, t, weight, eps, out):
        hidden = x.shape[1]
        row, place = x[t], out[t]
        total = np.float32(0.0)
        for i in range(hidden):
            value = widen(row[i])
            total += value * value
        factor = np.float32(1.0) / np.sqrt(total / np.float32(hidden) + eps)
        for i in range(hidden):
            # Rounded before the weight comes in, as the checkpoints were trained.
            normed = widen(narrow(widen(row[i]) * factor, out))
            place[i] = narrow(normed * widen(weight[i]), out)

    return norm_row


def _silu_mul(gate_up: Any, out: Any) -> None:
    """out[t] = silu(gate[t]) * up[t], silu(x) = x / (1 + e^-x), rounded between the two.

    gate_up  [num_tokens, 2 * inner], the gate first; out [num_tokens, inner]
    """
    num_tokens, inner = out.shape
    for t in prange(num_tokens):
        gates, ups, place = gate_up[t, :inner], gate_up[t, inner:], out[t]
        for i in range(inner):
            gate = widen(gates[i])
            silu = gate / (np.float32(1.0) + exp(-gate))
            place[i] = narrow(widen(narrow(silu, out)) * widen(ups[i]), out)


rms_norm = in_parallel(_rms_norm)
rms_norm_serially = serially(_rms_norm)
add_rms_norm = in_parallel(_add_rms_norm)
add_rms_norm_serially = serially(_add_rms_norm)
silu_mul = in_parallel(_silu_mul)
