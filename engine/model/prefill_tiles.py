"""Cuts a step's long chunks into the tiles that the CPU's prefill kernel divides among threads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.model.attention_units import padded_tables
from engine.model.inputs import ChunkInput
from engine.model.shares import balanced_starts, even_cuts
from punica_kernels.numba_prefill import MAX_TILE_ROWS, NUM_EARLIER, NUM_ROWS, TILE_COLUMNS

Array = np.ndarray[Any, Any]

_MIN_TILE_ROWS = 16  # smaller ones widen keys too often
_ROWS_OF_OVERHEAD = 4  # what it costs to widen a tile's keys, in rows that attend to them


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiles:
    """What punica_kernels.numba_prefill runs on in one step; shapes are there."""

    tiles: Array
    tile_starts: Array
    block_tables: Array


def plan_prefill_tiles(
    chunks: Sequence[ChunkInput], *, num_kv_heads: int, num_threads: int
) -> PrefillTiles:
    """Plan tiles of each chunk for each KV head, of about equal heights within a chunk."""
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    wanted = -(-num_tokens * num_kv_heads // num_threads)
    height = max(_MIN_TILE_ROWS, min(MAX_TILE_ROWS, wanted))
    tiles = []
    for table, chunk in enumerate(chunks):
        num_earlier = chunk.context_len - chunk.num_tokens
        for offset, stop in even_cuts(chunk.num_tokens, -(-chunk.num_tokens // height)):
            place = (chunk.row0 + offset, stop - offset, table, num_earlier + offset)
            tiles += [(*place, kv_head) for kv_head in range(num_kv_heads)]
    all_tiles = np.array(tiles, dtype=np.int64).reshape(-1, TILE_COLUMNS)
    heights, contexts = all_tiles[:, NUM_ROWS], all_tiles[:, NUM_EARLIER] + all_tiles[:, NUM_ROWS]
    return PrefillTiles(
        tiles=all_tiles,
        tile_starts=balanced_starts(contexts * (heights + _ROWS_OF_OVERHEAD), num_threads),
        block_tables=padded_tables([chunk.block_table for chunk in chunks]),
    )
