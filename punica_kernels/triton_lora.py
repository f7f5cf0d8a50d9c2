"""The LoRA products on Triton: BGMV for segments of one row, chunked SGMV for the others."""

import torch
from torch import Tensor

from punica_kernels.arena import Arena
from punica_kernels.device_plan import (
    DevicePlan,
    DeviceTables,
    ModuleTables,
    build_device_plan,
    longest_segment,
)
from punica_kernels.plan import LoraPlan
from punica_kernels.triton_bgmv import row_expand, row_shrink
from punica_kernels.triton_expand import expand
from punica_kernels.triton_shrink import shrink
from punica_kernels.triton_tiles import (
    LONG_LORA,
    ROW_LORA,
    SHORT_LORA,
    LoraTiles,
    RowTiles,
    family_of,
    lora_tiles,
    num_feature_splits,
)


class TritonLora:
    """Adds adapters of one arena on its device.

    Owns the arena's tables there; the arena itself is only read. The caller plans each step once
    and passes that plan to every layer.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.tables = DeviceTables(arena)
        self._family = family_of(arena.device)

    def plan(self, plan: LoraPlan) -> DevicePlan:
        """Return what the launches of a step read; adapters that changed are looked up anew."""
        tiles = lora_tiles(self._family, longest_segment=longest_segment(plan))
        return build_device_plan(plan, tables=self.tables, block_m=tiles.block_m)

    def add_lora(self, y: Tensor, x: Tensor, *, module: str, layer: int, plan: DevicePlan) -> None:
        """Add every adapter's part to the module's output, in place.

            y[t, columns of slice] += scale · (x[t] @ a[slice, span].T) @ b[span, columns]

        x  [num_tokens, in], y [num_tokens, out]; rows may be wider than that. Rows outside the
           plan's segments, and slices that an adapter leaves out, are neither read nor written.

        All sums are in fp32, in an order that doesn't depend on the rest of the batch; y is rounded
        once.
        """
        if module not in plan.modules:
            return
        spec = self.arena.module(module)
        assert x.shape == (plan.num_tokens, spec.in_features), "x is the module's input"
        assert y.shape == (plan.num_tokens, spec.out_features), "y is the module's output"
        a, b = self.arena.a(module)[layer], self.arena.b(module)[layer]
        tables = self.tables.of(module, layer)
        if plan.rows.shape[0] > 0:
            self._add_rows(y, x, a=a, b=b, tables=tables, plan=plan)
        if plan.tiles.shape[0] > 0:
            self._add_tiles(y, x, a=a, b=b, tables=tables, plan=plan)

    def add_once(self, y: Tensor, x: Tensor, *, module: str, layer: int, plan: LoraPlan) -> None:
        """Do what `add_lora` does, for one module that has a plan of its own, as the head has."""
        self.add_lora(y, x, module=module, layer=layer, plan=self.plan(plan))

    def _add_rows(
        self, y: Tensor, x: Tensor, *, a: Tensor, b: Tensor, tables: ModuleTables, plan: DevicePlan
    ) -> None:
        tiles = ROW_LORA[self._family]
        v = _rank_space(x, a, plan=plan, tiles=tiles)
        row_shrink(x, v, a=a, tables=tables, plan=plan, tiles=tiles)
        row_expand(v, y, b=b, tables=tables, plan=plan, tiles=tiles)

    def _add_tiles(
        self, y: Tensor, x: Tensor, *, a: Tensor, b: Tensor, tables: ModuleTables, plan: DevicePlan
    ) -> None:
        short = SHORT_LORA[self._family]
        tiles = short if plan.block_m == short.block_m else LONG_LORA[self._family]
        v = _rank_space(x, a, plan=plan, tiles=tiles)
        shrink(x, v, a=a, tables=tables, plan=plan, tiles=tiles)
        expand(v, y, b=b, tables=tables, plan=plan, tiles=tiles)


def lora_of(arena: Arena) -> TritonLora:
    """Return the one TritonLora of an arena, which is its back end from now on."""
    if not isinstance(arena.back_end, TritonLora):
        arena.back_end = TritonLora(arena)
    return arena.back_end


def add_lora(
    y: Tensor, x: Tensor, *, arena: Arena, module: str, layer: int, plan: LoraPlan
) -> None:
    """Do what reference.add_lora does; plans anew, so it is for single calls."""
    lora_of(arena).add_once(y, x, module=module, layer=layer, plan=plan)


def _rank_space(x: Tensor, a: Tensor, *, plan: DevicePlan, tiles: LoraTiles | RowTiles) -> Tensor:
    """Return v [num_splits, num_slices, num_tokens, rank_width] fp32, not initialised."""
    num_splits = num_feature_splits(x.shape[1], tiles.max_splits)
    # Both are powers of two.
    shape = (num_splits, a.shape[0], plan.num_tokens, max(plan.max_rank, tiles.block_r))
    return torch.empty(shape, dtype=torch.float32, device=x.device)
