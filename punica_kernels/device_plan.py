"""The small tensors that a LoRA launch reads: which rows, whose adapter, where its ranks lie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from punica_kernels.arena import Arena, ModuleWeights
from punica_kernels.plan import LoraPlan
from punica_kernels.triton_tiles import next_power_of_2

_FIRST_CAPACITY = 64
_SMALLEST_BUCKET = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """A LoraPlan as kernels read it, padded so that a captured graph can take another's numbers.

    tiles     [num_tiles, 3] int32: first row, rows, lora_index, of runs of at most block_m rows;
              padding has 0 rows
    rows      [num_single_rows, 2] int32: row, lora_index, of segments of one row; padding has
              lora_index -1
    max_rank  no adapter of the plan is wider anywhere; a power of two
    modules   those in which some adapter of the plan has rows
    """

    tiles: Tensor
    rows: Tensor
    block_m: int
    num_tokens: int
    max_rank: int
    modules: frozenset[str]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """What a captured graph is fixed to: plans of one shape may take each other's place."""
        counts = self.tiles.shape[0], self.rows.shape[0]
        return (*counts, self.block_m, self.num_tokens, self.max_rank)

    def take(self, other: DevicePlan) -> None:
        """Become `other` in place; both have one shape and the same modules."""
        assert self.shape == other.shape, "a graph only runs plans of its own shape"
        assert self.modules == other.modules, "a graph launches for the modules it was captured for"
        self.tiles.copy_(other.tiles)
        self.rows.copy_(other.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTables:
    """The tables of one layer's module: where its first slice stands in those of the arena.

    ranks, row0, scales   [capacity, num_columns] int32, int32, fp32; the slices of a layer's
                          module are neighbouring columns from column0 on
    """

    ranks: Tensor
    row0: Tensor
    scales: Tensor
    column0: int
    device_tables: DeviceTables
    module: str

    def column_tiles(self, block_n: int) -> Tensor:
        """Return [num_column_tiles, 3] int32: slice, first output column, columns."""
        return self.device_tables.column_tiles(self.module, block_n)

    @property
    def column_alignment(self) -> int:
        """Return a power of two, 16 at most, that every slice begins and ends at a multiple of."""
        return math.gcd(16, *self.device_tables.arena.module(self.module).slice_out_features)


class DeviceTables:
    """What the arena's own tables say, on its device: a line per adapter, replaced when it changes.

    Only whoever plans a step refreshes it, before the step's first launch.

    A line has a rank, a first row and a scale for every slice of every layer of every module, so
    that a kernel finds its own by lora_index, module, layer and slice alone.
    """

    def __init__(self, arena: Arena, *, capacity: int = _FIRST_CAPACITY) -> None:
        self.arena = arena
        self._columns: dict[str, int] = {}
        num_columns = 0
        for module in arena.modules:
            self._columns[module.name] = num_columns
            num_columns += arena.num_layers_of(module.name) * module.num_slices
        self._num_columns = num_columns
        self._ranks, self._row0, self._scales = self._empty(capacity)
        self._seen: dict[int, ModuleWeights] = {}
        self._max_ranks: dict[int, dict[str, int]] = {}
        self._column_tiles: dict[tuple[str, int], Tensor] = {}

    @property
    def capacity(self) -> int:
        """Lines there are; when it grows, the tensors are new ones and graphs are void."""
        return self._ranks.shape[0]

    def of(self, module: str, layer: int) -> ModuleTables:
        """Return the tables of one layer's module."""
        num_slices = self.arena.module(module).num_slices
        return ModuleTables(
            ranks=self._ranks,
            row0=self._row0,
            scales=self._scales,
            column0=self._columns[module] + layer * num_slices,
            device_tables=self,
            module=module,
        )

    def refresh(self, lora_indices: Iterable[int]) -> None:
        """Bring the lines of these adapters up to date; those that haven't changed cost nothing."""
        for lora_index in lora_indices:
            # Views die with any change of their adapter: the first one stands for all.
            token = self.arena.weights(self.arena.modules[0].name, 0, lora_index)
            if self._seen.get(lora_index) is not token:
                self._grow_to(lora_index + 1)
                self._write_line(lora_index)
                self._seen[lora_index] = token

    def max_ranks(self, lora_index: int) -> dict[str, int]:
        """Return an adapter's largest rank by module, those without rows left out."""
        return self._max_ranks[lora_index]

    def column_tiles(self, module: str, block_n: int) -> Tensor:
        """Return a module's output columns cut into tiles that don't cross slices, made once."""
        found = self._column_tiles.get((module, block_n))
        if found is None:
            spec = self.arena.module(module)
            lines = [
                (index, spec.column0(index) + start, min(block_n, width - start))
                for index, width in enumerate(spec.slice_out_features)
                for start in range(0, width, block_n)
            ]
            found = _on_device(lines, width=3, device=self.arena.device)
            self._column_tiles[module, block_n] = found
        return found

    def _empty(self, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = (capacity, self._num_columns)
        device = self.arena.device
        return (
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
        )

    def _grow_to(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        old = self._ranks, self._row0, self._scales
        new = self._empty(next_power_of_2(capacity))
        for old_table, new_table in zip(old, new, strict=True):
            new_table[: old_table.shape[0]] = old_table
        self._ranks, self._row0, self._scales = new

    def _write_line(self, lora_index: int) -> None:
        host = self.arena.tables
        ranks, row0s = (np.zeros(self._num_columns, dtype=np.int32) for _ in range(2))
        scales = np.zeros(self._num_columns, dtype=np.float32)
        max_ranks: dict[str, int] = {}
        for module in self.arena.modules:
            column0 = self._columns[module.name]
            of_module = host.ranks(module.name)[:, :, lora_index].ravel()
            columns = slice(column0, column0 + of_module.size)
            ranks[columns] = of_module
            row0s[columns] = host.row0s(module.group)[lora_index]
            scales[columns] = host.scales(module.name)[:, :, lora_index].ravel()
            if of_module.any():
                max_ranks[module.name] = int(of_module.max())
        self._ranks[lora_index] = torch.from_numpy(ranks)
        self._row0[lora_index] = torch.from_numpy(row0s)
        self._scales[lora_index] = torch.from_numpy(scales)
        self._max_ranks[lora_index] = max_ranks


def build_device_plan(plan: LoraPlan, *, tables: DeviceTables, block_m: int) -> DevicePlan:
    """Cut the plan's segments into tiles and single rows, padded to powers of two."""
    tiles: list[tuple[int, ...]] = []
    rows: list[tuple[int, ...]] = []
    for segment in plan.segments:
        if segment.num_tokens == 1:
            rows.append((segment.start, segment.lora_index))
            continue
        tiles += [
            (start, min(block_m, segment.stop - start), segment.lora_index)
            for start in range(segment.start, segment.stop, block_m)
        ]
    lora_indices = {segment.lora_index for segment in plan.segments}
    tables.refresh(lora_indices)
    widths = [tables.max_ranks(lora_index) for lora_index in lora_indices]
    device = tables.arena.device
    return DevicePlan(
        tiles=_on_device(_padded(tiles, (0, 0, 0)), width=3, device=device),
        rows=_on_device(_padded(rows, (0, -1)), width=2, device=device),
        block_m=block_m,
        num_tokens=plan.num_tokens,
        max_rank=next_power_of_2(max(max(width.values(), default=0) for width in widths)),
        modules=frozenset(name for width in widths for name in width),
    )


def longest_segment(plan: LoraPlan) -> int:
    """Return the rows of the plan's longest segment."""
    return max(segment.num_tokens for segment in plan.segments)


def _padded(
    lines: Sequence[tuple[int, ...]], padding: tuple[int, ...]
) -> Sequence[tuple[int, ...]]:
    """Pad to a bucket: no line at all, or a power of two of them."""
    if not lines:
        return lines
    bucket = max(next_power_of_2(len(lines)), _SMALLEST_BUCKET)
    return [*lines, *[padding] * (bucket - len(lines))]


def _on_device(lines: Sequence[tuple[int, ...]], *, width: int, device: torch.device) -> Tensor:
    table = torch.tensor(lines, dtype=torch.int32).view(-1, width)
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
