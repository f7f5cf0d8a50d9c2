"""The CPU back end: numba kernels over the memory of the torch tensors.

Long chunks of a model whose heads aren't whole panels are left to torch's attention, and long
segments of LoRA in a module that isn't to its products.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from engine.kvcache.storage import KVStorage
from engine.model import cpu_lora
from engine.model.attention import attend_into, plan_attention
from engine.model.attention_units import plan_units
from engine.model.cpu_lora import LoraSegments
from engine.model.inputs import LoraStep, StepInputs
from engine.model.linear import BaseLinear
from engine.model.panel_linear import PanelLinear
from engine.model.prefill_tiles import plan_prefill_tiles
from engine.model.read_ahead import NOTHING, ReadAhead
from engine.model.rotary import RotaryTable
from engine.model.spec import ModelSpec
from punica_kernels import numba_dots, numba_linear, numba_prefill, numba_rows
from punica_kernels.arena import Arena
from punica_kernels.numba_attention import HeadShape, attention_kernels
from punica_kernels.words import PAIRS, Seen, seen, words

Array = np.ndarray[Any, Any]

# Elements of a norm below which a second thread costs more than it brings.
_MIN_PARALLEL_ELEMENTS = 32 * 1024


class NumbaKernels:
    """Runs a decoder's steps by numba; owns the buffers that a step works in."""

    name = "numba"

    def __init__(self, spec: ModelSpec, rotary: RotaryTable, *, num_threads: int) -> None:
        self.spec = spec
        self.lay_over = None if numba_dots.problem() else PanelLinear.over
        self.num_threads = num_threads
        self.shape = HeadShape(
            num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim
        )
        self.attention = attention_kernels(self.shape)
        self.prefill = (
            numba_prefill.prefill_kernel(self.shape) if numba_prefill.takes(self.shape) else None
        )
        has_dots = rotary.dtype is torch.bfloat16 and numba_dots.problem() is None
        self.prefill_dtype = PAIRS if has_dots else words(torch.empty(0, dtype=rotary.dtype)).dtype
        self.eps = np.float32(spec.rms_norm_eps)
        self.cos, self.sin = (table.numpy() for table in rotary.half_tables())
        scratch_len = self.shape.scratch_len
        if self.prefill is not None:
            scratch_len = max(scratch_len, numba_prefill.scratch_len(self.shape))
        self.scratch = np.zeros((num_threads, scratch_len), dtype=np.float32)
        self._dtype = rotary.dtype
        self.no_norm = words(torch.zeros((0, 0), dtype=self._dtype))
        self._buffers: dict[str, torch.Tensor] = {}
        self._views: dict[str, Seen] = {}
        self._weights: dict[int, Seen] = {}
        self._kv: KVStorage | None = None
        self._flat_kv: list[tuple[Array, Array]] = []
        self._lora_scratch = np.zeros((num_threads, 0), dtype=np.float32)

    def begin(self, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None) -> "NumbaStep":
        """Plan the step's units; nothing is wiped, since nothing unwritten is read."""
        return NumbaStep(self, inputs, kv, lora)

    def buffer(self, name: str, num_rows: int, width: int) -> Seen:
        """Return [num_rows, width] of a buffer that is kept from step to step."""
        view = self._views.get(name)
        if view is not None and view.tensor.shape[0] == num_rows:
            return view
        found = self._buffers.get(name)
        if found is None or found.shape[0] < num_rows:
            found = self._buffers[name] = torch.empty((num_rows, width), dtype=self._dtype)
        view = self._views[name] = seen(found[:num_rows])
        return view

    def weight(self, weight: torch.Tensor) -> Array:
        """Return the words of a weight, which lives as long as the decoder."""
        found = self._weights.get(id(weight))
        if found is None:
            found = self._weights[id(weight)] = seen(weight)
        return found.words

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
        needed = cpu_lora.scratch_len(arena)
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
        spec, num_tokens = kernels.spec, inputs.num_tokens
        long_chunks = self._units.long_chunks
        self._tiles = self._torch_plan = None
        if long_chunks and kernels.prefill is not None:
            self._tiles = plan_prefill_tiles(
                long_chunks, num_kv_heads=spec.num_kv_heads, num_threads=kernels.num_threads
            )
        elif long_chunks:
            self._torch_plan = plan_attention(long_chunks, kv)
        self._normed = kernels.buffer("normed", num_tokens, spec.hidden)
        self._attended = kernels.buffer("attended", num_tokens, spec.q_features)
        self._inner = kernels.buffer("inner", num_tokens, spec.intermediate)
        kv_features = spec.num_kv_heads * spec.head_dim
        qkv = kernels.buffer("qkv", num_tokens, spec.q_features + 2 * kv_features)
        gate_up = kernels.buffer("gate_up", num_tokens, 2 * spec.intermediate)
        y = kernels.buffer("y", num_tokens, spec.hidden)
        self._products = {"qkv": qkv, "o": y, "gate_up": gate_up, "down": y}
        kept = (self._normed, self._attended, self._inner, qkv, gate_up, y)
        self._kept = {id(one.tensor): one for one in kept}
        self._norm, self._add_norm = numba_rows.rms_norm, numba_rows.add_rms_norm
        if self._normed.words.size < _MIN_PARALLEL_ELEMENTS:
            self._norm = numba_rows.rms_norm_serially
            self._add_norm = numba_rows.add_rms_norm_serially
        self._lora = None
        if lora is not None:
            self._lora = LoraSegments(
                lora, num_threads=kernels.num_threads, scratch=kernels.lora_scratch(lora.arena)
            )
        self._ahead: Mapping[str, ReadAhead] = {}
        if self._lora is not None and num_tokens > numba_linear.MAX_ROWS_OF_READING:
            self._ahead = self._lora.read_ahead()

    def product(
        self, linear: BaseLinear, x: torch.Tensor, *, module: str, layer: int
    ) -> torch.Tensor:
        """Multiply, and fetch meanwhile what the module's adapters will be read from."""
        if not isinstance(linear, PanelLinear):
            return linear.product(x)
        out, ahead = self._products[module], self._ahead.get(module, NOTHING)
        linear.multiply(self._seen(x).pairs, out.words, ahead=ahead, layer=layer)
        return out.tensor

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Norm each row."""
        kernels = self._kernels
        # It is the residual, which every layer comes back to.
        self._kept[id(x)] = residual = seen(x)
        self._norm(residual.words, kernels.weight(weight), kernels.eps, self._normed.words)
        return self._normed.tensor

    def add_rms_norm(
        self, residual: torch.Tensor, y: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add and norm each row, in one pass."""
        kernels = self._kernels
        residual_words, y_words = self._seen(residual).words, self._seen(y).words
        self._add_norm(
            residual_words, y_words, kernels.weight(weight), kernels.eps, self._normed.words
        )
        return self._normed.tensor

    def attend(
        self, qkv: torch.Tensor, *, layer: int, qk_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Turn q and k in place, then attend: short chunks by units, long ones in tiles."""
        kernels, units = self._kernels, self._units
        k, v = self._flat_kv[layer]
        norm = kernels.no_norm if qk_norm is None else kernels.weight(qk_norm)
        qkv_words = self._seen(qkv).words
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
                self._attended.words,
            )
        if self._tiles is not None:
            assert kernels.prefill is not None, "tiles are its own"
            kind = kernels.prefill_dtype
            kernels.prefill(
                qkv_words.view(kind),
                self._tiles.tiles,
                self._tiles.tile_starts,
                self._tiles.block_tables,
                self._kv.block_size,
                k.view(kind),
                v.view(kind),
                kernels.scratch,
                self._attended.words.view(kind),
            )
        if self._torch_plan is not None:
            spec = kernels.spec
            q = qkv[:, : spec.q_features].view(-1, spec.num_heads, spec.head_dim)
            attend_into(self._attended.tensor.view_as(q), q, self._kv, layer, self._torch_plan)
        return self._attended.tensor

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Multiply the halves."""
        numba_rows.silu_mul(self._seen(gate_up).words, self._inner.words)
        return self._inner.tensor

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, *, module: str, layer: int) -> None:
        """Add each segment's adapter to y, in place."""
        assert self._lora is not None, "the step carries adapters"
        self._lora.add(self._seen(y), self._seen(x), module=module, layer=layer)

    def _seen(self, tensor: torch.Tensor) -> Seen:
        """Return a tensor's memory, known already if it is one of the step's own."""
        return self._kept.get(id(tensor)) or seen(tensor)
