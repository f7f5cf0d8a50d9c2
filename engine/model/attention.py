"""Attention over the paged KV in plain torch: the path that stands in until a kernel does.

Chunks of one token are grouped into padded batches; longer chunks go one by one, in tiles of
query rows. Nothing of size [num_tokens, context] is ever made: the largest tensors are

    a group's gathered K or V   num_seqs · context · num_kv_heads · head_dim ≤ MAX_GATHER_ELEMENTS,
                                or one sequence's own, where that is larger
    the tile's mask             MAX_TILE_ROWS · (context + MAX_TILE_ROWS), once for all tiles
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from engine.kvcache.storage import KVStorage
from engine.model.inputs import ChunkInput

MAX_GATHER_ELEMENTS = 4 * 1024 * 1024
MAX_PADDING_ELEMENTS = 64 * 1024  # a row's; beyond it a group of its own is cheaper
MAX_TILE_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Chunks of one token whose context is gathered together.

    rows        a slice where the rows are neighbours, else [num_seqs] int64
    block_ids   [num_seqs, num_blocks]; short tables are padded with the sequence's own last
                block, so that no sequence ever reads another's KV
    mask        [num_seqs, 1, 1, num_blocks * block_size], 0 or -inf
    """

    rows: slice | torch.Tensor
    block_ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """A longer chunk; its tiles see `num_earlier + i` tokens in their row i.

    block_ids   [1, num_blocks]
    """

    row0: int
    num_tokens: int
    context_len: int
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """How a step's rows attend; made once, used by every layer.

    tile_mask   [tile_rows, width + tile_rows] with row i open up to column width + i: a tile with
                n earlier tokens takes the columns from width - n on. None without longer chunks
    """

    groups: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillChunk, ...]
    tile_mask: torch.Tensor | None
    tile_rows: int


def plan_attention(chunks: Sequence[ChunkInput], kv: KVStorage) -> AttentionPlan:
    """Decide groups and tiles for some chunks of one step."""
    decodes = [chunk for chunk in chunks if chunk.num_tokens == 1]
    longer = [chunk for chunk in chunks if chunk.num_tokens > 1]
    tile_rows = min(MAX_TILE_ROWS, max((chunk.num_tokens for chunk in longer), default=0))
    width = max((chunk.context_len for chunk in longer), default=0)
    return AttentionPlan(
        groups=tuple(_group(chunks, kv) for chunks in _split_decodes(decodes, kv)),
        prefills=tuple(
            PrefillChunk(
                row0=chunk.row0,
                num_tokens=chunk.num_tokens,
                context_len=chunk.context_len,
                block_ids=torch.tensor([chunk.block_table], device=kv.k.device),
            )
            for chunk in longer
        ),
        tile_mask=_tile_mask(tile_rows, width, kv) if longer else None,
        tile_rows=tile_rows,
    )


def attend(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    kv: KVStorage,
    layer: int,
    plan: AttentionPlan,
) -> torch.Tensor:  # [num_tokens, num_heads * head_dim]
    """Return softmax(q Kᵀ / √head_dim) V of each row over its own sequence's context.

    This step's K and V are already in `kv`. Scores and sums are in fp32.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    attend_into(out, q, kv, layer, plan)
    return out.flatten(1)


def attend_into(
    out: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    q: torch.Tensor,  # as out
    kv: KVStorage,
    layer: int,
    plan: AttentionPlan,
) -> None:
    """Do what `attend` does for the plan's rows of `out`; the others are left alone."""
    for group in plan.groups:
        _attend_group(q, out, kv, layer, group)
    for chunk in plan.prefills:
        _attend_chunk(q, out, kv, layer, chunk, plan)


def _attend_group(
    q: torch.Tensor, out: torch.Tensor, kv: KVStorage, layer: int, group: DecodeGroup
) -> None:
    k, v = kv.gather(layer, group.block_ids)  # [num_seqs, context, num_kv_heads, head_dim]
    # The query heads of one KV head see the same keys, so they stand where query rows would.
    rows = q[group.rows]
    heads = rows.view(rows.shape[0], kv.num_kv_heads, -1, kv.head_dim)
    attended = F.scaled_dot_product_attention(
        heads, k.transpose(1, 2), v.transpose(1, 2), attn_mask=group.mask
    ).flatten(1, 2)
    out[group.rows] = attended


def _attend_chunk(
    q: torch.Tensor,
    out: torch.Tensor,
    kv: KVStorage,
    layer: int,
    chunk: PrefillChunk,
    plan: AttentionPlan,
) -> None:
    assert plan.tile_mask is not None, "a longer chunk has its mask"
    k, v = kv.gather(layer, chunk.block_ids)  # [1, context, num_kv_heads, head_dim]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    width = plan.tile_mask.shape[1] - plan.tile_mask.shape[0]
    for tile0 in range(0, chunk.num_tokens, plan.tile_rows):
        num_rows = min(plan.tile_rows, chunk.num_tokens - tile0)
        num_earlier = chunk.context_len - chunk.num_tokens + tile0
        rows = slice(chunk.row0 + tile0, chunk.row0 + tile0 + num_rows)
        num_seen = num_earlier + num_rows
        out[rows] = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1).unsqueeze(0),  # [1, num_heads, num_rows, head_dim]
            k[:, :, :num_seen],
            v[:, :, :num_seen],
            attn_mask=plan.tile_mask[:num_rows, width - num_earlier : width + num_rows],
            enable_gqa=True,
        )[0].transpose(0, 1)


def _split_decodes(decodes: Sequence[ChunkInput], kv: KVStorage) -> list[list[ChunkInput]]:
    """Return groups within the element bound, chunks of similar context together."""
    slot_elements = kv.num_kv_heads * kv.head_dim * kv.block_size
    groups: list[list[ChunkInput]] = []
    for chunk in sorted(decodes, key=lambda chunk: -len(chunk.block_table)):
        # The first chunk of a group is its longest, so it fixes the padded length.
        if groups:
            num_blocks = len(groups[-1][0].block_table)
            gathered = (len(groups[-1]) + 1) * num_blocks * slot_elements
            padding = (num_blocks - len(chunk.block_table)) * slot_elements
            if gathered <= MAX_GATHER_ELEMENTS and padding <= MAX_PADDING_ELEMENTS:
                groups[-1].append(chunk)
                continue
        groups.append([chunk])
    return groups


def _group(chunks: list[ChunkInput], kv: KVStorage) -> DecodeGroup:
    ordered = sorted(chunks, key=lambda chunk: chunk.row0)
    num_blocks = max(len(chunk.block_table) for chunk in ordered)
    block_ids = [
        [*chunk.block_table, *[chunk.block_table[-1]] * (num_blocks - len(chunk.block_table))]
        for chunk in ordered
    ]
    device = kv.k.device
    lengths = torch.tensor([chunk.context_len for chunk in ordered], device=device)
    hidden_slots = torch.arange(num_blocks * kv.block_size, device=device) >= lengths[:, None]
    mask = torch.zeros(hidden_slots.shape, dtype=kv.k.dtype, device=device)
    mask.masked_fill_(hidden_slots, -torch.inf)
    return DecodeGroup(
        rows=_rows([chunk.row0 for chunk in ordered], device),
        block_ids=torch.tensor(block_ids, device=device),
        mask=mask[:, None, None, :],
    )


def _rows(rows: list[int], device: torch.device) -> slice | torch.Tensor:
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _tile_mask(tile_rows: int, width: int, kv: KVStorage) -> torch.Tensor:
    shape = (tile_rows, width + tile_rows)
    mask = torch.full(shape, -torch.inf, dtype=kv.k.dtype, device=kv.k.device)
    return mask.triu_(width + 1)
