"""Base products in bf16: the weight is read once, for few rows as fast as memory gives it.

The weight lies in panels as oneDNN lays it out for CPUs with bf16 dot products: PANEL_COLUMNS
output features, pair of inputs after pair of inputs.
"""

from typing import Any

from numba import prange

from punica_kernels.numba_both import in_parallel
from punica_kernels.numba_dots import (
    LANES,
    LINE_PAIRS,
    PANEL_COLUMNS,
    PIECE_LINES,
    ROWS,
    multiply_panel,
)

UNIT_COLUMNS = PANEL_COLUMNS // 2  # what is shared out among threads
_WHOLE, _HALF = PANEL_COLUMNS // LANES, UNIT_COLUMNS // LANES  # vectors
_LINES = PANEL_COLUMNS // LINE_PAIRS  # of a panel, for each pair of k
MAX_ROWS_OF_READING = ROWS * _LINES  # with fewer, or as many, no piece is fetched


def _multiply(
    x: Any, weight: Any, initial: Any, starts: Any, out: Any, pieces: Any, piece_starts: Any,
    layer: Any
) -> None:  # fmt: skip
    """out = round(initial + x Wᵀ), the sums in fp32.

    x        [num_rows, in_features / 2] pairs of bf16, contiguous
    weight   [out_features * in_features / 2] pairs, in panels
    initial  [out_features] fp32: the bias, or zeros
    starts   [num_threads + 1]: where each thread's units of UNIT_COLUMNS columns begin
    out      [num_rows, out_features] bf16, contiguous
    pieces   [num_pieces, 2] int64: memory to be read soon, as multiply_panel takes it
    piece_starts  [num_threads + 1]: which pieces each thread fetches
    layer    which one the pieces are wanted of

    With many rows there are more products than memory to read for them: as many pieces are fetched
    meanwhile as that leaves time for.
    """
    num_rows, depth = x.shape
    flat_x, flat_out, width = x.reshape(-1), out.reshape(-1), out.shape[1]
    panel_pairs = depth * PANEL_COLUMNS
    num_groups = (num_rows + ROWS - 1) // ROWS
    lines = 2 if 1 < num_groups < _LINES else 1  # asked for with each pair of k
    for thread in prange(starts.shape[0] - 1):
        unit, stop = starts[thread], starts[thread + 1]
        last_panel = (stop - 1) // 2
        piece, last_piece = piece_starts[thread], piece_starts[thread + 1] - 1
        while unit < stop:
            is_whole = unit % 2 == 0 and unit + 1 < stop
            column = unit * UNIT_COLUMNS
            panel0 = unit // 2 * panel_pairs + unit % 2 * UNIT_COLUMNS
            next0 = min(unit // 2 + 1, last_panel) * panel_pairs
            for group in range(num_groups):
                # The first rows ask for their share of the next panel, while this one is at hand.
                ahead0 = next0 + group * lines * LINE_PAIRS
                step = PANEL_COLUMNS if group * lines < _LINES else 0
                row = group * ROWS
                place, x0, left = row * width + column, row * depth, num_rows - row
                if is_whole and group * lines >= _LINES and piece <= last_piece:
                    multiply_panel(
                        flat_out, place, width, initial, column, flat_x, x0, depth, left,
                        weight, panel0, ahead0, step, pieces, piece, last_piece, layer, _WHOLE, 0,
                    )  # fmt: skip
                    piece += depth // PIECE_LINES
                elif is_whole and lines == 1:
                    multiply_panel(
                        flat_out, place, width, initial, column, flat_x, x0, depth, left,
                        weight, panel0, ahead0, step, pieces, piece, last_piece, layer, _WHOLE, 1,
                    )  # fmt: skip
                elif is_whole:
                    multiply_panel(
                        flat_out, place, width, initial, column, flat_x, x0, depth, left,
                        weight, panel0, ahead0, step, pieces, piece, last_piece, layer, _WHOLE, 2,
                    )  # fmt: skip
                else:
                    multiply_panel(
                        flat_out, place, width, initial, column, flat_x, x0, depth, left,
                        weight, panel0, ahead0, step, pieces, piece, last_piece, layer, _HALF, 2,
                    )  # fmt: skip
            unit += 2 if is_whole else 1


multiply = in_parallel(_multiply)
