"""Cuts a step's attention into the units that the CPU kernel divides among threads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.model.inputs import ChunkInput
from engine.model.shares import balanced_starts
from punica_kernels.numba_attention import UNIT_COLUMNS, WHOLE_ROW

MAX_ROWS_BY_KERNEL = 16  # of a chunk; longer ones are for tiled attention
MIN_KEYS_OF_PART = 256  # fewer aren't worth a thread of their own
_KEYS_OF_OVERHEAD = 32  # what a unit costs whatever its length

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionUnits:
    """What punica_kernels.numba_attention runs on in one step; shapes are there.

    long_chunks   chunks that aren't in `units`
    turned_rows   rows whose q and k are turned, and k and v stored, before any unit runs
    """

    units: Array
    unit_starts: Array
    block_tables: Array
    turned_rows: Array
    joins: Array
    num_partials: int
    long_chunks: tuple[ChunkInput, ...]


def plan_units(chunks: Sequence[ChunkInput], *, num_threads: int) -> AttentionUnits:
    """Plan one step: decode rows are turned by their own unit, others before."""
    units: list[tuple[int, int, int, int, int, int]] = []
    turned: list[int] = []
    joins: list[tuple[int, int, int]] = []
    long_chunks: list[ChunkInput] = []
    short = [chunk for chunk in chunks if chunk.num_tokens <= MAX_ROWS_BY_KERNEL]
    num_rows = sum(chunk.num_tokens for chunk in short)
    num_parts = max(1, num_threads // num_rows) if num_rows else 1
    num_partials = 0
    tables: list[Sequence[int]] = []
    for chunk in chunks:
        rows = range(chunk.row0, chunk.row0 + chunk.num_tokens)
        if chunk.num_tokens > MAX_ROWS_BY_KERNEL:
            long_chunks.append(chunk)
            turned += rows
            continue
        table = len(tables)
        tables.append(chunk.block_table)
        parts = min(num_parts, chunk.context_len // MIN_KEYS_OF_PART)
        is_fresh = chunk.num_tokens == 1 and parts <= 1
        if not is_fresh:
            turned += rows
        for row in rows:
            stop = chunk.context_len - (rows.stop - 1 - row)
            if parts <= 1:
                units.append((row, table, 0, stop, int(is_fresh), WHOLE_ROW))
                continue
            joins.append((row, num_partials, parts))
            for part in range(parts):
                first, last = stop * part // parts, stop * (part + 1) // parts
                units.append((row, table, first, last, 0, num_partials))
                num_partials += 1
    all_units = np.array(units, dtype=np.int64).reshape(-1, UNIT_COLUMNS)
    return AttentionUnits(
        units=all_units,
        unit_starts=balanced_starts(
            all_units[:, 3] - all_units[:, 2] + _KEYS_OF_OVERHEAD, num_threads
        ),
        block_tables=padded_tables(tables),
        turned_rows=np.array(turned, dtype=np.int64),
        joins=np.array(joins, dtype=np.int64).reshape(-1, 3),
        num_partials=num_partials,
        long_chunks=tuple(long_chunks),
    )


def padded_tables(tables: Sequence[Sequence[int]]) -> Array:
    """Return block tables as [num_tables, max_num_blocks] int32."""
    width = max((len(table) for table in tables), default=0)
    padded = np.zeros((len(tables), width), dtype=np.int32)
    for line, table in zip(padded, tables, strict=True):
        line[: len(table)] = table
    return padded
