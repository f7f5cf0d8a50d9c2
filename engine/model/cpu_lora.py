"""A step's adapters on the CPU back end: which kernel takes which segment."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.model.inputs import LoraStep
from engine.model.read_ahead import ReadAhead, lora_rows
from engine.model.shares import balanced_starts, even_cuts
from punica_kernels import cpu, numba_bgmv, numba_lora, numba_sgmv
from punica_kernels.arena import Arena
from punica_kernels.plan import Segment, split_by_length
from punica_kernels.words import PAIRS, Seen

Array = np.ndarray[Any, Any]

_TOKENS_OF_OVERHEAD = 2  # what it costs to read an adapter's rows, in tokens
_MIN_PART_TOKENS = 2  # for fewer a second thread costs more than it brings
_MIN_TILE_ROWS = 24  # smaller ones widen an adapter's rows too often


class LoraSegments:
    """Short segments for one kernel, tiles of long ones for another, and torch where neither does.

    scratch  [num_threads, scratch_len] fp32
    """

    def __init__(self, lora: LoraStep, *, num_threads: int, scratch: Array) -> None:
        self._arena = arena = lora.arena
        self._scratch = scratch
        short, self._long = split_by_length(lora.plan, max_tokens=numba_lora.MAX_TOKENS)
        self._segments = plan_lora_segments(short, num_threads=num_threads)
        self._starts = balanced_starts(self._segments[:, 1] + _TOKENS_OF_OVERHEAD, num_threads)
        self._add, self._add_rows = numba_lora.add_segments, numba_bgmv.add_rows
        if len(self._segments) <= 1:
            self._add = numba_lora.add_segments_serially
            self._add_rows = numba_bgmv.add_rows_serially
        self._by_rows = {one.name for one in arena.modules if numba_bgmv.takes(one, arena.dtype)}
        self._tiled = {one.name for one in arena.modules if numba_sgmv.takes(one)}
        segments = self._long.segments if self._long else ()
        self._tiles = plan_lora_tiles(segments, num_threads=num_threads)
        self._tile_starts = balanced_starts(self._tiles[:, 1] + _TOKENS_OF_OVERHEAD, num_threads)

    def add(self, y: Seen, x: Seen, *, module: str, layer: int) -> None:
        """Add each segment's adapter to y, in place."""
        arena = self._arena
        views = arena.views(module, layer)
        in_pairs = views[0].dtype == PAIRS
        y_words, x_words = (y.pairs, x.pairs) if in_pairs else (y.words, x.words)
        if len(self._segments) > 0:
            add = self._add_rows if module in self._by_rows else self._add
            add(y_words, x_words, *views, self._segments, self._starts, self._scratch)
        if self._long is None:
            return
        if module in self._tiled:
            numba_sgmv.add_tiles(
                y_words, x_words, *views, self._tiles, self._tile_starts, self._scratch
            )
        else:
            cpu.add_lora(
                y.tensor, x.tensor, arena=arena, module=module, layer=layer, plan=self._long
            )

    def read_ahead(self) -> dict[str, ReadAhead]:
        """Return by module what the short segments will read: most of it comes from memory."""
        if len(self._segments) == 0:
            return {}
        indices = self._segments[:, 2]
        inner = [module.name for module in self._arena.modules if module.num_layers is None]
        return {name: lora_rows(self._arena, name, indices, self._starts) for name in inner}


def scratch_len(arena: Arena) -> int:
    """Return the fp32 elements that a thread needs for any module and span of `arena`."""
    inner = [module for module in arena.modules if module.num_layers is None]
    in_features = max(module.in_features for module in inner)
    max_rank = max(arena.num_rows.values())
    short = numba_lora.scratch_len(
        in_features=in_features,
        out_features=max(module.out_features for module in inner),
        num_slices=max(module.num_slices for module in inner),
        max_rank=max_rank,
    )
    return max(short, numba_sgmv.scratch_len(in_features=in_features, max_rank=max_rank))


def plan_lora_segments(segments: Sequence[Segment], *, num_threads: int) -> Array:
    """Return [n, 3] int64 for numba_lora: cut where there are fewer segments than threads."""
    parts_each = max(1, num_threads // max(1, len(segments)))
    parts = [
        (segment.start + start, stop - start, segment.lora_index)
        for segment in segments
        for start, stop in even_cuts(
            segment.num_tokens, max(1, min(parts_each, segment.num_tokens // _MIN_PART_TOKENS))
        )
    ]
    return np.array(parts, dtype=np.int64).reshape(-1, 3)


def plan_lora_tiles(segments: Sequence[Segment], *, num_threads: int) -> Array:
    """Return [num_tiles, 3] int64 for numba_sgmv: long segments in as many tiles as share out well.

    A segment's tiles are of about equal heights.
    """
    num_tokens = sum(segment.num_tokens for segment in segments)
    tokens_each = -(-num_tokens // num_threads)
    # Of one tile a thread; as few as the kernel's tallest tile allows.
    num_rounds = max(1, -(-tokens_each // numba_sgmv.MAX_TILE_ROWS))
    height = max(_MIN_TILE_ROWS, -(-tokens_each // num_rounds))
    tiles = [
        (segment.start + start, stop - start, segment.lora_index)
        for segment in segments
        for start, stop in even_cuts(segment.num_tokens, -(-segment.num_tokens // height))
    ]
    return np.array(tiles, dtype=np.int64).reshape(-1, 3)
