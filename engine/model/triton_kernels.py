"""The CUDA back end: Triton kernels for everything beside the base products.

Importing this needs triton; assembly does so only where it was chosen.
"""

import torch

from engine.kvcache.storage import KVStorage
from engine.model.inputs import LoraStep, StepInputs
from engine.model.rotary import RotaryTable
from engine.model.spec import ModelSpec
from punica_kernels.attention_tiles import plan_attention
from punica_kernels.fused_layers import add_rms_norm, rms_norm, rotate, silu_mul
from punica_kernels.paged_attention import paged_attention
from punica_kernels.store_kv import store_kv
from punica_kernels.triton_lora import TritonLora


class TritonKernels:
    """Runs a decoder's steps by Triton; keeps the arena's tables on the device."""

    name = "triton"

    def __init__(self, spec: ModelSpec, rotary: RotaryTable) -> None:
        self.spec = spec
        self.rotary = rotary
        self._lora: TritonLora | None = None

    def begin(self, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None) -> "TritonStep":
        """Plan the step's tiles; nothing is wiped, since nothing unwritten is read."""
        return TritonStep(self, inputs, kv, lora)

    def lora_of(self, step: LoraStep) -> TritonLora:
        """Return what adds the adapters of a step's arena; the tables are kept between steps."""
        if self._lora is None or self._lora.arena is not step.arena:
            self._lora = TritonLora(step.arena)
        return self._lora


class TritonStep:
    """One step's tiles, tables and views."""

    def __init__(
        self, kernels: TritonKernels, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None
    ) -> None:
        spec = self._spec = kernels.spec
        self._kv = kv
        self._kv_slots = inputs.kv_slots
        cos, signed_sin = kernels.rotary.rows(inputs.positions)
        self._cos, self._signed_sin = cos.squeeze(1), signed_sin.squeeze(1)
        self._attention = plan_attention(
            inputs.chunks,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            dtype=kv.k.dtype,
            device=kv.k.device,
        )
        self._lora = self._lora_plan = None
        if lora is not None:
            self._lora = kernels.lora_of(lora)
            self._lora_plan = self._lora.plan(lora.plan)

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
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        scale = spec.head_dim**-0.5
        paged_attention(q, out, k=k_cells, v=v_cells, plan=self._attention, scale=scale)
        return out.flatten(1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Multiply the halves."""
        return silu_mul(gate_up)

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, *, module: str, layer: int) -> None:
        """Add the adapters' parts by BGMV and SGMV."""
        assert self._lora is not None, "the step carries adapters"
        assert self._lora_plan is not None, "the step's adapters are planned"
        self._lora.add_lora(y, x, module=module, layer=layer, plan=self._lora_plan)
