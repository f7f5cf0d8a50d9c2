"""The flat tensors of one step, made once from its plan and shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.model.device import integers_on
from punica_kernels.plan import select_rows

if TYPE_CHECKING:
    from engine.scheduler.plan import StepPlan
    from punica_kernels.arena import Arena
    from punica_kernels.plan import LoraPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkInput:
    """One sequence's rows in the step: `row0 … row0 + num_tokens`.

    context_len   tokens of the sequence that its last row sees, this chunk included
    block_table   the sequence's block ids; at least context_len tokens long
    """

    row0: int
    num_tokens: int
    context_len: int
    block_table: SequenceABC[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Everything that the decoder reads of a step but weights, KV and adapters.

    token_ids, positions   [num_tokens] int64
    kv_slots               [num_tokens] int64, all different
    chunks                 in row order, together covering every row once
    sampled_rows           [num_draws] int64, never falling; a row is there once for each token
                           that is drawn from its logits
    begun_blocks           [num_blocks] int64 or None: blocks that this step begins and doesn't
                           fill; they are wiped before anything is written
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    chunks: tuple[ChunkInput, ...]
    sampled_rows: torch.Tensor
    begun_blocks: torch.Tensor | None

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return self.token_ids.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraStep:
    """What turns base products into adapted ones in this step; absent for base traffic."""

    arena: Arena
    plan: LoraPlan

    def for_head(self, rows: SequenceABC[int]) -> LoraStep | None:
        """Return what the head adds to `rows` of the step; None if no adapter of them has any."""
        carriers = {segment.lora_index for segment in self.plan.segments}
        if not any(self.arena.carries("head", lora_index) for lora_index in carriers):
            return None
        plan = select_rows(self.plan, rows)
        return None if plan is None else LoraStep(arena=self.arena, plan=plan)


def build_inputs(plan: StepPlan, *, block_size: int, device: torch.device) -> StepInputs:
    """Flatten the chunks of `plan`, in its order."""
    token_ids: list[int] = []
    positions: list[int] = []
    kv_slots: list[int] = []
    chunks: list[ChunkInput] = []
    sampled_rows: list[int] = []
    begun_blocks: list[int] = []
    for chunk in plan.chunks:
        table = chunk.sequence.block_table
        stop = chunk.start + chunk.num_tokens
        assert len(table) * block_size >= stop, "every token of a chunk has its slot"
        chunks.append(
            ChunkInput(
                row0=len(token_ids),
                num_tokens=chunk.num_tokens,
                context_len=stop,
                block_table=table[: -(-stop // block_size)],
            )
        )
        token_ids += chunk.sequence.token_ids[chunk.start : stop]
        positions += range(chunk.start, stop)
        kv_slots += slots_of(table, chunk.start, stop, block_size=block_size)
        if begins_without_filling(chunk.start, stop, block_size):
            begun_blocks.append(table[stop // block_size])
        sampled_rows += [len(token_ids) - 1] * len(chunk.drawn_samples)
    assert len(token_ids) == len(positions) == len(kv_slots), "one row a token"

    def tensor(values: list[int]) -> torch.Tensor:
        return integers_on(device, values)

    return StepInputs(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        kv_slots=tensor(kv_slots),
        chunks=tuple(chunks),
        sampled_rows=tensor(sampled_rows),
        begun_blocks=tensor(begun_blocks) if begun_blocks else None,
    )


def slots_of(block_table: SequenceABC[int], start: int, stop: int, *, block_size: int) -> list[int]:
    """Return the kv_slots of tokens `start … stop` of a sequence."""
    return [
        block_table[position // block_size] * block_size + position % block_size
        for position in range(start, stop)
    ]


def begins_without_filling(start: int, stop: int, block_size: int) -> bool:
    """Say whether tokens `start … stop` enter a last block at its first slot and don't fill it."""
    return stop % block_size != 0 and start <= stop - stop % block_size
