"""Segmented LoRA on a CPU: each adapter's rows are read once, all slices of a module in one call.

For segments of few tokens, where reading the rows is what costs, of any widths and formats;
numba_bgmv takes those that it can, and numba_sgmv longer ones.
"""

from typing import Any

import numpy as np
from numba import prange
from numba.extending import overload

from punica_kernels.numba_both import in_parallel, serially
from punica_kernels.numba_pairs import (
    add_four_scaled,
    add_into,
    add_scaled,
    ask_for,
    dot,
    elements_of,
    spread,
)

MAX_TOKENS = 8  # of a segment that these kernels take
_ROWS_AT_ONCE = 4


def scratch_len(*, in_features: int, out_features: int, num_slices: int, max_rank: int) -> int:
    """Return the fp32 elements that a thread works in: inputs, v and outputs."""
    return MAX_TOKENS * (in_features + num_slices * max_rank + out_features)


def _add_segments(y, x, a, b, row0s, ranks, scales, column0s, segments, segment_starts, scratch):
    """y[t, columns of slice] += scale * (x[t] · a[slice, span]ᵀ) · b[span, columns].

    y               [num_tokens, out], x [num_tokens, in]
    a               [num_slices, num_rows, in], b [num_rows, out]: the arena's, of one layer; with
                    x and y all in pairs of bf16 (see numba_pairs) or all in elements
    row0s           [capacity] int64, by lora_index
    ranks, scales   [num_slices, capacity] int64 and fp32
    column0s        [num_slices + 1] first column of each slice, and the end, in y's own elements
    segments        [num_segments, 3] int64: start, num_tokens (at most MAX_TOKENS), lora_index
    segment_starts  [num_threads + 1]: which segments a thread takes
    scratch         [num_threads, scratch_len] fp32

    All arithmetic is fp32, y is rounded once, and a row's result depends on no
    other row. While a segment's rows are read, those of the thread's next are asked for: an
    adapter's rows lie in pieces too short for the machine's own prefetching.
    """
    for thread in prange(segment_starts.shape[0] - 1):
        stop = segment_starts[thread + 1]
        for i in range(segment_starts[thread], stop):
            _add_segment(
                y, x, a, b, row0s, ranks, scales, column0s, scratch[thread],
                segments[i, 0], segments[i, 1], segments[i, 2], segments[min(i + 1, stop - 1), 2],
            )  # fmt: skip


def _add_segment(*_arguments: Any) -> None:
    raise NotImplementedError("runs in numba kernels only")


@overload(_add_segment, inline="always")
def _add_segment_in_kernel(
    y, x, a, b, row0s, ranks, scales, column0s, mine, start, num_tokens, lora_index, next_lora_index
):  # fmt: skip
    def add_segment(
        y, x, a, b, row0s, ranks, scales, column0s, mine, start, num_tokens, lora_index,
        next_lora_index,
    ):  # fmt: skip
        # Inner loops run over rows cut out before: an index that is a sum might be negative, and
        # the check for that keeps a loop from being vectorised.
        num_slices, per = a.shape[0], elements_of(y)
        in_features, out_features = a.shape[2] * per, y.shape[1] * per
        row0, next_row0 = row0s[lora_index], row0s[next_lora_index]
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
            spread(x[start + t], wide_x[t])
        for s in range(num_slices):
            scale = scales[s, lora_index]
            for r in range(ranks[s, lora_index]):
                a_row = a[s, row0 + r]
                if r < ranks[s, next_lora_index]:
                    ask_for(a[s, next_row0 + r])
                for t in range(num_tokens):
                    v[s, t, r] = dot(wide_x[t], a_row) * scale
        # A row of b lies in one piece for all slices, so they are taken side by side.
        for r in range(0, max_rank, _ROWS_AT_ONCE):
            row = row0 + r
            for s in range(num_slices):
                column0, column1 = column0s[s], column0s[s + 1]
                for more in range(min(_ROWS_AT_ONCE, ranks[s, next_lora_index] - r)):
                    ask_for(b[next_row0 + r + more, column0:column1])
                num_rows = min(_ROWS_AT_ONCE, ranks[s, lora_index] - r)
                if num_rows == _ROWS_AT_ONCE:
                    b_0, b_1 = b[row, column0:column1], b[row + 1, column0:column1]
                    b_2, b_3 = b[row + 2, column0:column1], b[row + 3, column0:column1]
                    for t in range(num_tokens):
                        out = wide_y[t, column0 * per : column1 * per]
                        add_four_scaled(out, v[s, t, r : r + _ROWS_AT_ONCE], b_0, b_1, b_2, b_3)
                    continue
                for more in range(num_rows):
                    b_row = b[row + more, column0:column1]
                    for t in range(num_tokens):
                        out = wide_y[t, column0 * per : column1 * per]
                        add_scaled(out, v[s, t, r + more], b_row)
        for s in range(num_slices):
            column0, column1 = column0s[s], column0s[s + 1]
            if ranks[s, lora_index] > 0:
                for t in range(num_tokens):
                    out = wide_y[t, column0 * per : column1 * per]
                    add_into(y[start + t, column0:column1], out)

    return add_segment


add_segments = in_parallel(_add_segments)
add_segments_serially = serially(_add_segments)
