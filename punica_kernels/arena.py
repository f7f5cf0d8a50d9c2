"""The static tensors of rank rows, one pair per module, and the tables that say whose they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from punica_kernels.arena_tables import ArenaTables
from punica_kernels.lazy_zeros import lazy_zeros
from punica_kernels.plan import LoraPlan
from punica_kernels.words import PAIRS, Words, words

# One number per layer and slice, as [num_layers][num_slices].
LayerTable = Sequence[Sequence[float]]
# See Arena.views.
ModuleViews = tuple[Words, Words, Words, Words, Words, Words]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpec:
    """One linear module of each layer, packed of slices that have the input in common.

    name                 "qkv", "o", "gate_up", "down"; outside the layers "embedding" and "head"
    group                adapters have one span of rows per group ("attention", "mlp", …)
    slice_out_features   output columns of each slice, in order: q|k|v is three slices
    num_layers           None for as many as the model has, 1 outside the layers
    """

    name: str
    group: str
    in_features: int
    slice_out_features: tuple[int, ...]
    num_layers: int | None = None

    @property
    def num_slices(self) -> int:
        """How many LoRA targets the module holds."""
        return len(self.slice_out_features)

    @property
    def out_features(self) -> int:
        """Output columns of all slices together."""
        return sum(self.slice_out_features)

    def column0(self, slice_index: int) -> int:
        """First output column of a slice."""
        return sum(self.slice_out_features[:slice_index])


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An adapter's contiguous rank rows in one group."""

    row0: int
    num_rows: int

    @property
    def stop(self) -> int:
        """One past the last row."""
        return self.row0 + self.num_rows


class LoraBackEnd(Protocol):
    """Adds adapters of one arena; keeps what it needs of the arena's tables between steps."""

    def add_once(self, y: Tensor, x: Tensor, *, module: str, layer: int, plan: LoraPlan) -> None:
        """Do what dispatch.add_lora does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceWeights:
    """One slice of one adapter in one layer: views of the arena, exactly `rank` rows high.

    a_t  [in, rank], a seen from its side
    b    [rank, out of the slice]
    """

    slice_index: int
    rank: int
    scale: float
    a_t: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleWeights:
    """One adapter in one layer's module. Slices without weights are left out; may be empty.

    stacked_a  [num_slices, rank, in] and stacked_b [rank, out], when the module has all its
               slices in one rank, and more than one; else None
    """

    slices: tuple[SliceWeights, ...]
    stacked_a: Tensor | None
    stacked_b: Tensor | None


@dataclass(slots=True, kw_only=True)
class _Entry:
    """One row of the tables, and the views that were cut for it; views die with any change."""

    spans: dict[str, Span]
    ranks: dict[str, LayerTable]
    scales: dict[str, LayerTable]
    views: dict[tuple[str, int], ModuleWeights]


class Arena:
    """Holds the rank rows of every resident adapter; decides nothing.

    Per module two tensors in the base's dtype, never reallocated:

        a  [num_layers, num_slices, num_rows, in]
        b  [num_layers, num_rows, out]       transposed, cut by the slices' column ranges

    An adapter is a lora_index with a span per group, and a rank and a scale per module, layer and
    slice. Rank 0 means that the slice has no weights. Rows of a span above a slice's rank are never
    read, so whatever an earlier adapter left there is harmless. Rows are committed by the operating
    system when they are first written.

    Only ArenaWriter writes, between steps.

    back_end   runs this arena's products where it was chosen to; None leaves it to dispatch
    """

    def __init__(
        self,
        *,
        modules: Sequence[ModuleSpec],
        num_layers: int,
        num_rows: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_layers = num_layers
        self.num_rows = dict(num_rows)
        self.dtype = dtype
        self.device = device
        self._modules = {module.name: module for module in modules}
        assert len(self._modules) == len(modules), "module names are unique"
        self._a: dict[str, Tensor] = {}
        self._b: dict[str, Tensor] = {}
        for module in modules:
            rows = self.num_rows[module.group]
            layers = self.num_layers_of(module.name)
            a_shape = (layers, module.num_slices, rows, module.in_features)
            self._a[module.name] = lazy_zeros(a_shape, dtype=dtype, device=device)
            b_shape = (layers, rows, module.out_features)
            self._b[module.name] = lazy_zeros(b_shape, dtype=dtype, device=device)
        self._entries: dict[int, _Entry] = {}
        self._views: dict[tuple[str, int], ModuleViews] = {}
        self._views_of = 0
        self.back_end: LoraBackEnd | None = None
        self.tables = ArenaTables(
            groups=tuple(self.num_rows),
            shapes={
                module.name: (self.num_layers_of(module.name), module.num_slices)
                for module in modules
            },
        )

    @property
    def modules(self) -> tuple[ModuleSpec, ...]:
        """The modules that may carry LoRA, in the order of a layer."""
        return tuple(self._modules.values())

    @property
    def num_bytes(self) -> int:
        """Address space of all rows; what is really in memory grows up to it."""
        tensors = [*self._a.values(), *self._b.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @staticmethod
    def row_bytes(
        modules: Sequence[ModuleSpec], *, num_layers: int, dtype: torch.dtype
    ) -> dict[str, int]:
        """Return the bytes of one rank row of each group, over all its modules and layers."""
        sizes: dict[str, int] = {}
        for module in modules:
            elements = module.num_slices * module.in_features + module.out_features
            layers = num_layers if module.num_layers is None else module.num_layers
            num_bytes = elements * layers * dtype.itemsize
            sizes[module.group] = sizes.get(module.group, 0) + num_bytes
        return sizes

    def module(self, name: str) -> ModuleSpec:
        """Return the extents of a module."""
        return self._modules[name]

    def num_layers_of(self, module: str) -> int:
        """Return in how many layers a module is: 1 if it is outside them."""
        layers = self._modules[module].num_layers
        return self.num_layers if layers is None else layers

    def carries(self, module: str, lora_index: int) -> bool:
        """Say whether an adapter has rows in a module, in any layer."""
        return module in self._entries[lora_index].ranks

    def a(self, module: str) -> Tensor:
        """Return [num_layers, num_slices, num_rows, in]."""
        return self._a[module]

    def b(self, module: str) -> Tensor:
        """Return [num_layers, num_rows, out]."""
        return self._b[module]

    def set_adapter(
        self,
        lora_index: int,
        *,
        spans: Mapping[str, Span],
        ranks: Mapping[str, LayerTable],
        scales: Mapping[str, LayerTable],
    ) -> None:
        """Make `lora_index` mean these spans; no row is read or written.

        ranks and scales are [num_layers][num_slices] by module; a module left out has rank 0. A
        group left out has no rows.
        """
        for name, table in ranks.items():
            module = self._modules[name]
            span = spans.get(module.group, Span(row0=0, num_rows=0))
            self._check_inside(module.group, span)
            assert len(table) == self.num_layers_of(name), "one line per layer"
            for line in table:
                assert len(line) == module.num_slices, "one rank per slice"
                assert all(0 <= rank <= span.num_rows for rank in line), "ranks fit the span"
        self._entries[lora_index] = _Entry(
            spans=dict(spans), ranks=dict(ranks), scales=dict(scales), views={}
        )
        self.tables.clear(lora_index)
        for group, span in spans.items():
            self.tables.set_rows(lora_index, group, span.row0)
        for name, table in ranks.items():
            self.tables.set_module(lora_index, name, table, scales[name])

    def clear_adapter(self, lora_index: int) -> None:
        """Forget `lora_index`; its rows keep their bytes until somebody writes over them."""
        self._entries.pop(lora_index, None)
        self.tables.clear(lora_index)

    def spans(self, lora_index: int) -> Mapping[str, Span]:
        """Return the adapter's span by group."""
        return self._entries[lora_index].spans

    def write(
        self, module: str, layer: int, slice_index: int, span: Span, *, a: Tensor, b: Tensor
    ) -> None:
        """Copy rows of one slice to the first rows of `span`, casting to the arena's dtype.

        a  [n, in], b [n, out of the slice] (already transposed), n at most span.num_rows
        """
        num_rows = a.shape[0]
        assert num_rows == b.shape[0] <= span.num_rows, "rows fit the span"
        first_rows = Span(row0=span.row0, num_rows=num_rows)
        a_place, b_place = self.places(module, layer, slice_index, first_rows)
        a_place.copy_(a)
        b_place.copy_(b)

    def places(
        self, module: str, layer: int, slice_index: int, span: Span
    ) -> tuple[Tensor, Tensor]:
        """Return where the rows of `span` lie for one slice: views [n, in] and [n, out]."""
        spec = self._modules[module]
        self._check_inside(spec.group, span)
        rows = slice(span.row0, span.stop)
        column0 = spec.column0(slice_index)
        columns = slice(column0, column0 + spec.slice_out_features[slice_index])
        return self._a[module][layer, slice_index, rows], self._b[module][layer, rows, columns]

    def move(self, group: str, src: Span, dst_row0: int) -> None:
        """Move a span's rows to `dst_row0` in every module of the group, tables included.

        The places may overlap. Rows that are left keep their bytes.
        """
        dst = Span(row0=dst_row0, num_rows=src.num_rows)
        self._check_inside(group, src)
        self._check_inside(group, dst)
        for module in self._modules.values():
            if module.group != group:
                continue
            a, b = self._a[module.name], self._b[module.name]
            for layer in range(self.num_layers_of(module.name)):
                # A layer at a time, so that the copy that makes overlap safe stays small.
                a[layer, :, dst.row0 : dst.stop] = a[layer, :, src.row0 : src.stop].clone()
                b[layer, dst.row0 : dst.stop] = b[layer, src.row0 : src.stop].clone()
        for lora_index, entry in self._entries.items():
            if entry.spans.get(group) == src:
                entry.spans[group] = dst
                entry.views.clear()
                self.tables.set_rows(lora_index, group, dst.row0)

    def weights(self, module: str, layer: int, lora_index: int) -> ModuleWeights:
        """Return the adapter's views for one layer's module, cut once and kept until it changes."""
        entry = self._entries[lora_index]
        found = entry.views.get((module, layer))
        if found is None:
            found = entry.views[module, layer] = self._cut(entry, module, layer)
        return found

    def views(self, module: str, layer: int) -> ModuleViews:
        """Return what a numba kernel reads of one layer's module; cut once, kept while tables do.

        a [num_slices, num_rows, in], b [num_rows, out], row0s [capacity], ranks and scales
        [num_slices, capacity], first columns [num_slices + 1]. Rows and columns are in pairs of
        bf16 where the module's widths allow (see numba_pairs), else in elements.
        """
        if self._views_of != self.tables.generation:
            self._views.clear()
            self._views_of = self.tables.generation
        found = self._views.get((module, layer))
        if found is None:
            spec = self._modules[module]
            a, b = words(self._a[module][layer]), words(self._b[module][layer])
            column0s = np.cumsum([0, *spec.slice_out_features])
            if a.dtype == np.uint16 and not any((*column0s % 2, spec.in_features % 2)):
                a, b, column0s = a.view(PAIRS), b.view(PAIRS), column0s // 2
            found = self._views[module, layer] = (
                a,
                b,
                self.tables.row0s(spec.group),
                self.tables.ranks(module)[layer],
                self.tables.scales(module)[layer],
                column0s,
            )
        return found

    def _check_inside(self, group: str, span: Span) -> None:
        assert span.row0 >= 0, "no span starts before the arena"
        assert span.stop <= self.num_rows[group], "no span ends behind the arena"

    def _cut(self, entry: _Entry, module: str, layer: int) -> ModuleWeights:
        if module not in entry.ranks:
            return ModuleWeights(slices=(), stacked_a=None, stacked_b=None)
        spec = self._modules[module]
        ranks = [int(rank) for rank in entry.ranks[module][layer]]
        row0 = entry.spans[spec.group].row0 if any(ranks) else 0
        a, b = self._a[module][layer], self._b[module][layer]
        slices = []
        for index, rank in enumerate(ranks):
            column0 = spec.column0(index)
            columns = slice(column0, column0 + spec.slice_out_features[index])
            rows = slice(row0, row0 + rank)
            if rank > 0:
                scale = float(entry.scales[module][layer][index])
                slices.append(
                    SliceWeights(
                        slice_index=index,
                        rank=rank,
                        scale=scale,
                        a_t=a[index, rows].t(),
                        b=b[rows, columns],
                    )
                )
        uniform = len(ranks) > 1 and ranks[0] > 0 and len(set(ranks)) == 1
        rows = slice(row0, row0 + ranks[0])
        return ModuleWeights(
            slices=tuple(slices),
            stacked_a=a[:, rows] if uniform else None,
            stacked_b=b[rows] if uniform else None,
        )
