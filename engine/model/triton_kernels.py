"""The CUDA back end: Triton kernels for everything beside the base products.

Importing this needs triton; assembly does so only where it was chosen.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from engine.kvcache.storage import KVStorage
from engine.model.inputs import ChunkInput, LoraStep, StepInputs
from engine.model.linear import BaseLinear
from engine.model.rotary import RotaryTable
from engine.model.spec import ModelSpec
from punica_kernels.attention_tiles import PagedPlan, plan_attention
from punica_kernels.device_plan import DevicePlan
from punica_kernels.flashinfer_attention import FlashInferAttention, FlashInferPlan
from punica_kernels.fused_layers import add_rms_norm, rms_norm, rotate, silu_mul
from punica_kernels.paged_attention import paged_attention
from punica_kernels.store_kv import store_kv
from punica_kernels.triton_lora import TritonLora, lora_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonPlan:
    """The small tables that a step's launches read; all that changes between steps of one shape.

    num_adapter_lines   there are in the arena's tables on the device; None without LoRA
    """

    attention: PagedPlan | FlashInferPlan
    lora: DevicePlan | None
    num_adapter_lines: int | None

    @property
    def shape(self) -> Hashable:
        """What a captured graph is fixed to: plans of one shape may take each other's place."""
        assert isinstance(self.attention, PagedPlan), "FlashInfer's steps aren't captured"
        if self.lora is None:
            return self.attention.shape
        return self.attention.shape, self.lora.shape, self.lora.modules, self.num_adapter_lines

    def take(self, other: "TritonPlan") -> None:
        """Become `other` in place; both have one shape."""
        assert self.shape == other.shape, "a graph only runs plans of its own shape"
        assert isinstance(self.attention, PagedPlan), "as shape has seen"
        assert isinstance(other.attention, PagedPlan), "as shape has seen"
        self.attention.take(other.attention)
        if self.lora is not None and other.lora is not None:
            self.lora.take(other.lora)


class TritonKernels:
    """Runs a decoder's steps by Triton.

    flashinfer   attends in steps with a chunk of several tokens; None: our kernel does. Steps of
                 single tokens are always ours, captured or not, so that both give the same bits
    """

    name = "triton"
    lay_over = None

    def __init__(
        self,
        spec: ModelSpec,
        rotary: RotaryTable,
        *,
        flashinfer: FlashInferAttention | None = None,
    ) -> None:
        self.spec = spec
        self.rotary = rotary
        self.flashinfer = flashinfer

    def begin(self, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None) -> "TritonStep":
        """Plan the step's tiles, and begin it."""
        plan = self.plan(inputs, kv, lora)
        return self.step(plan, kv, lora, positions=inputs.positions, kv_slots=inputs.kv_slots)

    def plan(self, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None) -> TritonPlan:
        """Cut chunks and adapters into tiles; the arena's tables on the device are brought up.

        Our kernels read nothing unwritten. Of FlashInfer's nobody says so: with it, the blocks that
        the step begins are wiped, whoever attends in this step.
        """
        if self.flashinfer is not None and inputs.begun_blocks is not None:
            kv.wipe(inputs.begun_blocks)
        attention = self._attention(inputs.chunks, kv)
        if lora is None:
            return TritonPlan(attention=attention, lora=None, num_adapter_lines=None)
        adapters = lora_of(lora.arena)
        lora_plan = adapters.plan(lora.plan)
        num_lines = adapters.tables.capacity
        return TritonPlan(attention=attention, lora=lora_plan, num_adapter_lines=num_lines)

    def _attention(self, chunks: Sequence[ChunkInput], kv: KVStorage) -> PagedPlan | FlashInferPlan:
        if self.flashinfer is not None and any(chunk.num_tokens > 1 for chunk in chunks):
            return self.flashinfer.plan(chunks)
        return plan_attention(
            chunks,
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            dtype=kv.k.dtype,
            device=kv.k.device,
        )

    def step(
        self,
        plan: TritonPlan,
        kv: KVStorage,
        lora: LoraStep | None,
        *,
        positions: torch.Tensor,  # [num_tokens] int64
        kv_slots: torch.Tensor,  # [num_tokens] int64; -1 for padding, which writes nothing
    ) -> "TritonStep":
        """Begin a step that is planned. Nothing here or later waits for the device."""
        return TritonStep(
            spec=self.spec,
            rotary_rows=self.rotary.rows(positions),
            kv=kv,
            kv_slots=kv_slots,
            plan=plan,
            lora=None if lora is None else lora_of(lora.arena),
        )


class TritonStep:
    """One step's tiles, tables and views."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        rotary_rows: tuple[torch.Tensor, torch.Tensor],
        kv: KVStorage,
        kv_slots: torch.Tensor,
        plan: TritonPlan,
        lora: TritonLora | None,
    ) -> None:
        self._spec = spec
        cos, signed_sin = rotary_rows
        self._cos, self._signed_sin = cos.squeeze(1), signed_sin.squeeze(1)
        self._kv = kv
        self._kv_slots = kv_slots
        self._plan = plan
        self._lora = lora

    def product(
        self, linear: BaseLinear, x: torch.Tensor, *, module: str, layer: int
    ) -> torch.Tensor:
        """Multiply, whatever the module."""
        return linear.product(x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Norm each row."""
        return rms_norm(x, weight, self._spec.rms_norm_eps)

    def add_rms_norm(
        self, residual: torch.Tensor, y: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add and norm in one pass over the rows."""
        return add_rms_norm(residual, y, weight, self._spec.rms_norm_eps)

    def attend(
        self, qkv: torch.Tensor, *, layer: int, qk_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Turn q and k in place, store k and v, and attend over the blocks where they lie."""
        spec = self._spec
        num_qk_heads = spec.num_heads + spec.num_kv_heads
        heads = qkv.view(-1, num_qk_heads + spec.num_kv_heads, spec.head_dim)
        qk, v = heads[:, :num_qk_heads], heads[:, num_qk_heads:]
        if qk_norm is not None:
            qk = rms_norm(qk, qk_norm, spec.rms_norm_eps)
        rotate(qk, self._cos, self._signed_sin)
        q, k = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
        k_cells, v_cells = self._kv.k[layer], self._kv.v[layer]
        store_kv(k, v, k_cells=k_cells, v_cells=v_cells, kv_slots=self._kv_slots)
        attention = self._plan.attention
        if isinstance(attention, FlashInferPlan):
            return attention.attend(q, k=k_cells, v=v_cells).flatten(1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        scale = spec.head_dim**-0.5
        paged_attention(q, out, k=k_cells, v=v_cells, plan=attention, scale=scale)
        return out.flatten(1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Multiply the halves."""
        return silu_mul(gate_up)

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, *, module: str, layer: int) -> None:
        """Add the adapters' parts by BGMV and SGMV."""
        assert self._lora is not None, "the step carries adapters"
        assert self._plan.lora is not None, "the step's adapters are planned"
        self._lora.add_lora(y, x, module=module, layer=layer, plan=self._plan.lora)
