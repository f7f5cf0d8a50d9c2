"""The CPU back end: numba kernels over the memory of the torch tensors.

Attention over long chunks, and LoRA over long segments, are left to torch's own products.
"""

from typing import Any

import numpy as np
import torch

from engine.kvcache.storage import KVStorage
from engine.model.attention import attend_into, plan_attention
from engine.model.attention_units import balanced_starts, plan_units
from engine.model.inputs import LoraStep, StepInputs
from engine.model.rotary import RotaryTable
from engine.model.spec import ModelSpec
from punica_kernels import cpu, numba_lora, numba_rows
from punica_kernels.arena import Arena, ModuleSpec
from punica_kernels.numba_attention import HeadShape, attention_kernels
from punica_kernels.plan import split_by_length
from punica_kernels.words import words

Array = np.ndarray[Any, Any]

# Elements of a norm below which a second thread costs more than it brings.
_MIN_PARALLEL_ELEMENTS = 32 * 1024


class NumbaKernels:
    """Runs a decoder's steps by numba; owns the buffers that a step works in."""

    name = "numba"

    def __init__(self, spec: ModelSpec, rotary: RotaryTable, *, num_threads: int) -> None:
        self.spec = spec
        self.num_threads = num_threads
        self.shape = HeadShape(
            num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim
        )
        self.attention = attention_kernels(self.shape)
        self.eps = np.float32(spec.rms_norm_eps)
        self.cos, self.sin = (table.numpy() for table in rotary.half_tables())
        self.scratch = np.zeros((num_threads, self.shape.scratch_len), dtype=np.float32)
        self._dtype = rotary.dtype
        self.no_norm = words(torch.zeros((0, 0), dtype=self._dtype))
        self._buffers: dict[str, torch.Tensor] = {}
        self._kv: KVStorage | None = None
        self._flat_kv: list[tuple[Array, Array]] = []
        self._lora_scratch = np.zeros((num_threads, 0), dtype=np.float32)

    def begin(self, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None) -> "NumbaStep":
        """Plan the step's units; nothing is wiped, since nothing unwritten is read."""
        return NumbaStep(self, inputs, kv, lora)

    def buffer(self, name: str, num_rows: int, width: int) -> torch.Tensor:
        """Return [num_rows, width] of a buffer that is kept from step to step."""
        found = self._buffers.get(name)
        if found is None or found.shape[0] < num_rows:
            found = self._buffers[name] = torch.empty((num_rows, width), dtype=self._dtype)
        return found[:num_rows]

    def flat_kv(self, kv: KVStorage) -> list[tuple[Array, Array]]:
        """Return K and V of each layer, flat."""
        if self._kv is not kv:
            self._kv = kv
            self._flat_kv = [
                (words(k).reshape(-1), words(v).reshape(-1))
                for k, v in zip(kv.k, kv.v, strict=True)
            ]
        return self._flat_kv

    def lora_scratch(self, arena: Arena) -> Array:
        """Return [num_threads, n] for the widest module and span of `arena`."""
        inner = [module for module in arena.modules if _is_inner(module)]
        needed = numba_lora.scratch_len(
            in_features=max(module.in_features for module in inner),
            out_features=max(module.out_features for module in inner),
            num_slices=max(module.num_slices for module in inner),
            max_rank=max(arena.num_rows.values()),
        )
        if self._lora_scratch.shape[1] < needed:
            self._lora_scratch = np.zeros((self.num_threads, needed), dtype=np.float32)
        return self._lora_scratch


class NumbaStep:
    """One step's units, segments and views of memory."""

    def __init__(
        self, kernels: NumbaKernels, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None
    ) -> None:
        self._kernels = kernels
        self._kv = kv
        self._flat_kv = kernels.flat_kv(kv)
        self._positions = inputs.positions.numpy()
        self._kv_slots = inputs.kv_slots.numpy()
        self._units = plan_units(inputs.chunks, num_threads=kernels.num_threads)
        self._partials = np.empty(
            (self._units.num_partials, kernels.shape.partial_len), dtype=np.float32
        )
        long_chunks = self._units.long_chunks
        self._tiled = plan_attention(long_chunks, kv) if long_chunks else None
        spec, num_tokens = kernels.spec, inputs.num_tokens
        self._normed = kernels.buffer("normed", num_tokens, spec.hidden)
        self._normed_words = words(self._normed)
        self._attended = kernels.buffer("attended", num_tokens, spec.q_features)
        self._attended_words = words(self._attended)
        self._inner = kernels.buffer("inner", num_tokens, spec.intermediate)
        self._inner_words = words(self._inner)
        self._norm, self._add_norm = numba_rows.rms_norm, numba_rows.add_rms_norm
        if self._normed.numel() < _MIN_PARALLEL_ELEMENTS:
            self._norm = numba_rows.rms_norm_serially
            self._add_norm = numba_rows.add_rms_norm_serially
        self._lora = None if lora is None else _ShortSegments(kernels, lora)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Norm each row."""
        self._norm(words(x), words(weight), self._kernels.eps, self._normed_words)
        return self._normed

    def add_rms_norm(
        self, residual: torch.Tensor, y: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add and norm each row, in one pass."""
        self._add_norm(
            words(residual), words(y), words(weight), self._kernels.eps, self._normed_words
        )
        return self._normed

    def attend(
        self, qkv: torch.Tensor, *, layer: int, qk_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Turn q and k in place, then attend: short chunks by units, long ones in tiles."""
        kernels, units = self._kernels, self._units
        k, v = self._flat_kv[layer]
        norm = kernels.no_norm if qk_norm is None else words(qk_norm)
        qkv_words = words(qkv)
        place = (self._positions, self._kv_slots, kernels.cos, kernels.sin, norm, kernels.eps, k, v)
        if len(units.turned_rows):
            kernels.attention.rotate(qkv_words, units.turned_rows, *place)
        if len(units.units):
            kernels.attention.attend(
                qkv_words,
                units.units,
                units.unit_starts,
                units.block_tables,
                self._kv.block_size,
                *place,
                kernels.scratch,
                self._partials,
                units.joins,
                self._attended_words,
            )
        if self._tiled is not None:
            spec = kernels.spec
            q = qkv[:, : spec.q_features].view(-1, spec.num_heads, spec.head_dim)
            attend_into(self._attended.view_as(q), q, self._kv, layer, self._tiled)
        return self._attended

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Multiply the halves."""
        numba_rows.silu_mul(words(gate_up), self._inner_words)
        return self._inner

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, *, module: str, layer: int) -> None:
        """Add short segments by the kernel, and long ones by products."""
        assert self._lora is not None, "the step carries adapters"
        self._lora.add(y, x, module=module, layer=layer)


class _ShortSegments:
    """A step's adapters, divided by the length of their segments."""

    def __init__(self, kernels: NumbaKernels, lora: LoraStep) -> None:
        self._arena = lora.arena
        short, self._long = split_by_length(lora.plan, max_tokens=numba_lora.MAX_TOKENS)
        fields = [(one.start, one.num_tokens, one.lora_index) for one in short]
        self._segments = np.array(fields, dtype=np.int64).reshape(-1, 3)
        self._starts = balanced_starts(self._segments[:, 1] + 2, kernels.num_threads)
        is_one = len(self._segments) <= 1
        self._add = numba_lora.add_segments_serially if is_one else numba_lora.add_segments
        self._scratch = kernels.lora_scratch(lora.arena)

    def add(self, y: torch.Tensor, x: torch.Tensor, *, module: str, layer: int) -> None:
        arena = self._arena
        if self._long is not None:
            cpu.add_lora(y, x, arena=arena, module=module, layer=layer, plan=self._long)
        if len(self._segments) == 0:
            return
        views = arena.views(module, layer)
        kind = views[0].dtype  # words, or pairs of them
        y_words, x_words = words(y).view(kind), words(x).view(kind)
        self._add(y_words, x_words, *views, self._segments, self._starts, self._scratch)


def _is_inner(module: ModuleSpec) -> bool:
    return module.num_layers is None
