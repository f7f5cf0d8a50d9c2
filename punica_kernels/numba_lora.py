"""Segmented LoRA on a CPU: each adapter's rows are read once, all slices of a module in one call.

For segments of few tokens, where reading the rows is what costs; long segments are for a matrix
library.
"""

from typing import Any

import numpy as np
from numba import njit, prange
from numba.extending import overload

from punica_kernels.numba_floats import FAST_SUMS, narrow, widen

MAX_TOKENS = 8  # of a segment that these kernels take
_ROWS_AT_ONCE = 4


def scratch_len(*, in_features: int, out_features: int, num_slices: int, max_rank: int) -> int:
    """Return the fp32 elements that a thread works in: inputs, v and outputs."""
    return MAX_TOKENS * (in_features + num_slices * max_rank + out_features)


def _add_segments(y, x, a, b, row0s, ranks, scales, column0s, segments, segment_starts, scratch):
    """y[t, columns of slice] += scale * (x[t] · a[slice, span]ᵀ) · b[span, columns].

    y               [num_tokens, out], x [num_tokens, in]
    a               [num_slices, num_rows, in], b [num_rows, out]: the arena's, of one layer
    row0s           [capacity] int64, by lora_index
    ranks, scales   [num_slices, capacity] int64 and fp32
    column0s        [num_slices + 1] first column of each slice, and the end
    segments        [num_segments, 3] int64: start, num_tokens (at most MAX_TOKENS), lora_index
    segment_starts  [num_threads + 1]: which segments a thread takes
    scratch         [num_threads, scratch_len] fp32

    All arithmetic is fp32, y is rounded once, and a row's result depends on no
    other row.
    """
    for thread in prange(segment_starts.shape[0] - 1):
        for i in range(segment_starts[thread], segment_starts[thread + 1]):
            _add_segment(
                y, x, a, b, row0s, ranks, scales, column0s, scratch[thread],
                segments[i, 0], segments[i, 1], segments[i, 2],
            )  # fmt: skip


def _add_segment(*_arguments: Any) -> None:
    raise NotImplementedError("runs in numba kernels only")


@overload(_add_segment, jit_options={"fastmath": FAST_SUMS})
def _add_segment_in_kernel(
    y, x, a, b, row0s, ranks, scales, column0s, mine, start, num_tokens, lora_index
):
    def add_segment(
        y, x, a, b, row0s, ranks, scales, column0s, mine, start, num_tokens, lora_index
    ):
        # Inner loops run over rows cut out before: an index that is a sum might be negative, and
        # the check for that keeps a loop from being vectorised.
        num_slices, in_features, out_features = a.shape[0], a.shape[2], y.shape[1]
        row0 = row0s[lora_index]
        max_rank = 0
        for s in range(num_slices):
            max_rank = max(max_rank, ranks[s, lora_index])
        wide_x = mine[: num_tokens * in_features].reshape((num_tokens, in_features))
        v0 = num_tokens * in_features
        y0 = v0 + num_tokens * num_slices * max_rank
        v = mine[v0:y0].reshape((num_slices, num_tokens, max_rank))
        wide_y = mine[y0 : y0 + num_tokens * out_features].reshape((num_tokens, out_features))
        wide_y[:] = np.float32(0.0)
        for t in range(num_tokens):
            wide, narrow_x = wide_x[t], x[start + t]
            for i in range(in_features):
                wide[i] = widen(narrow_x[i])
        for s in range(num_slices):
            scale = scales[s, lora_index]
            for r in range(ranks[s, lora_index]):
                a_row = a[s, row0 + r]
                for t in range(num_tokens):
                    wide = wide_x[t]
                    total = np.float32(0.0)
                    for i in range(in_features):
                        total += wide[i] * widen(a_row[i])
                    v[s, t, r] = total * scale
        # A row of b lies in one piece for all slices, so they are taken side by side.
        for r in range(0, max_rank, _ROWS_AT_ONCE):
            row = row0 + r
            for s in range(num_slices):
                column0, column1 = column0s[s], column0s[s + 1]
                num_rows = min(_ROWS_AT_ONCE, ranks[s, lora_index] - r)
                if num_rows == _ROWS_AT_ONCE:
                    b_0, b_1 = b[row, column0:column1], b[row + 1, column0:column1]
                    b_2, b_3 = b[row + 2, column0:column1], b[row + 3, column0:column1]
                    for t in range(num_tokens):
                        out, v_t = wide_y[t, column0:column1], v[s, t]
                        v_0, v_1, v_2, v_3 = v_t[r], v_t[r + 1], v_t[r + 2], v_t[r + 3]
                        for c in range(out.shape[0]):
                            out[c] += (
                                v_0 * widen(b_0[c])
                                + v_1 * widen(b_1[c])
                                + v_2 * widen(b_2[c])
                                + v_3 * widen(b_3[c])
                            )
                    continue
                for more in range(num_rows):
                    b_0 = b[row + more, column0:column1]
                    for t in range(num_tokens):
                        out, v_0 = wide_y[t, column0:column1], v[s, t, r + more]
                        for c in range(out.shape[0]):
                            out[c] += v_0 * widen(b_0[c])
        for s in range(num_slices):
            column0, column1 = column0s[s], column0s[s + 1]
            if ranks[s, lora_index] == 0:
                continue
            for t in range(num_tokens):
                place, out = y[start + t, column0:column1], wide_y[t, column0:column1]
                for c in range(out.shape[0]):
                    place[c] = narrow(widen(place[c]) + out[c], y)

    return add_segment


add_segments = njit(parallel=True, fastmath=FAST_SUMS, cache=True)(_add_segments)
add_segments_serially = njit(fastmath=FAST_SUMS, cache=True)(_add_segments)
