"""Which query rows attend where: the small tensors that a launch of paged attention reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from punica_kernels.attention_chunk import AttentionChunk
from punica_kernels.triton_tiles import (
    AttentionTiles,
    decode_tiles,
    family_of,
    next_power_of_2,
    num_context_splits,
    prefill_tiles,
)

_SMALLEST_BUCKET = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTiles:
    """Query tokens that one launch takes, in tiles of at most `block_q` of one sequence.

    lines       [num_tiles, 4] int32: first row, rows, tokens before the first row, sequence;
                padding has 0 rows
    num_splits  into how many parts each tile's context is cut
    """

    lines: Tensor
    block_q: int
    num_splits: int
    tiles: AttentionTiles


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPlan:
    """How a step's rows attend; made once, used by every layer.

    Chunks of one token and longer ones are launched apart: the first want little tiles and, when
    they are few, many splits.

    block_tables   [num_seqs, max_blocks] int32, both padded to powers of two; what is behind a
                   sequence's last block isn't read
    """

    launches: tuple[QueryTiles, ...]
    block_tables: Tensor

    @property
    def shape(self) -> tuple[object, ...]:
        """What a captured graph is fixed to: plans of one shape may take each other's place."""
        launches = [(one.lines.shape[0], one.block_q, one.num_splits) for one in self.launches]
        return (*launches, tuple(self.block_tables.shape))

    def take(self, other: "PagedPlan") -> None:
        """Become `other` in place; both have one shape."""
        assert self.shape == other.shape, "a graph only runs plans of its own shape"
        self.block_tables.copy_(other.block_tables)
        for mine, theirs in zip(self.launches, other.launches, strict=True):
            mine.lines.copy_(theirs.lines)


def plan_attention(
    chunks: Sequence[AttentionChunk],
    *,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PagedPlan:
    """Cut the chunks of a step into tiles, padded to powers of two."""
    family, group = family_of(device), next_power_of_2(num_heads // num_kv_heads)
    decodes = [index for index, chunk in enumerate(chunks) if chunk.num_tokens == 1]
    longer = [index for index, chunk in enumerate(chunks) if chunk.num_tokens > 1]
    launches = []
    for members, tiles in (
        (decodes, decode_tiles(family, dtype)),
        (longer, prefill_tiles(family, dtype)),
    ):
        if members:
            block_q = 1 if members is decodes else max(tiles.block_m // group, 1)
            lines = [line for index in members for line in _lines(chunks[index], index, block_q)]
            num_splits = num_context_splits(
                num_programs=len(lines) * num_kv_heads,
                longest_context=max(chunks[index].context_len for index in members),
            )
            launches.append(
                QueryTiles(
                    lines=_on_device(_padded(lines), device),
                    block_q=block_q,
                    num_splits=num_splits,
                    tiles=tiles,
                )
            )
    return PagedPlan(launches=tuple(launches), block_tables=_block_tables(chunks, device))


def _lines(chunk: AttentionChunk, index: int, block_q: int) -> list[tuple[int, ...]]:
    num_earlier = chunk.context_len - chunk.num_tokens
    return [
        (chunk.row0 + start, min(block_q, chunk.num_tokens - start), num_earlier + start, index)
        for start in range(0, chunk.num_tokens, block_q)
    ]


def _padded(lines: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Pad with lines of zeros to a power of two."""
    bucket = max(next_power_of_2(len(lines)), _SMALLEST_BUCKET)
    return [*lines, *[(0,) * len(lines[0])] * (bucket - len(lines))]


def _block_tables(chunks: Sequence[AttentionChunk], device: torch.device) -> Tensor:
    width = next_power_of_2(max(len(chunk.block_table) for chunk in chunks))
    tables = [(*chunk.block_table, *[0] * (width - len(chunk.block_table))) for chunk in chunks]
    return _on_device(_padded(tables), device)


def _on_device(lines: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    table = torch.tensor(lines, dtype=torch.int32)
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
