"""What a decoder computes beside its base products, and the plain torch that defines it.

A back end implements two classes: one that lives as long as the decoder, and one for a step, which
holds what all layers of that step share.
"""

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from engine.kvcache.storage import KVStorage
from engine.model.attention import attend, plan_attention
from engine.model.inputs import LoraStep, StepInputs
from engine.model.linear import BaseLinear, LayOver
from engine.model.rotary import RotaryTable
from engine.model.spec import ModelSpec
from punica_kernels.dispatch import add_lora


class KernelStep(Protocol):
    """The kernels of one step. Results may live in buffers that the next call of the same method
    overwrites; a caller uses them at once.
    """

    def product(
        self, linear: BaseLinear, x: torch.Tensor, *, module: str, layer: int
    ) -> torch.Tensor:
        """Return the base product of x, which is `module`'s in `layer`."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return x / rms(x) · weight for x [num_tokens, hidden]; x is unchanged."""

    def add_rms_norm(
        self, residual: torch.Tensor, y: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add y to residual in place, [num_tokens, hidden] both; return the sum normed."""

    def attend(
        self,
        qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 num_kv_heads) * head_dim]
        *,
        layer: int,
        qk_norm: torch.Tensor | None,  # [num_heads + num_kv_heads, head_dim]
    ) -> torch.Tensor:  # [num_tokens, num_heads * head_dim]
        """Norm and turn q and k, store k and v, and attend. May write to qkv."""

    def silu_mul(
        self,
        gate_up: torch.Tensor,  # [num_tokens, 2 * intermediate]
    ) -> torch.Tensor:  # [num_tokens, intermediate]
        """Return silu(gate) · up. May write to gate_up."""

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, *, module: str, layer: int) -> None:
        """Add the step's adapters to y, the module's base product of x, in place."""


class StepKernels(Protocol):
    """A back end for one decoder."""

    @property
    def name(self) -> str:
        """What `loraplex doctor` and the start-up lines call it."""

    @property
    def lay_over(self) -> LayOver | None:
        """Base products of its own over weights that the library has laid out, if it has any."""

    def begin(self, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None) -> KernelStep:
        """Prepare a step: whatever its layers share is made here, once."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) · weight over the last dimension, the first factor in fp32.

    It is rounded to x's format before the weight comes in, as the checkpoints were trained.
    """
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


class PlainKernels:
    """Plain torch: runs everywhere, and is what the others are compared with."""

    name = "torch"
    lay_over = None

    def __init__(self, spec: ModelSpec, rotary: RotaryTable) -> None:
        self._spec = spec
        self._rotary = rotary

    def begin(self, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None) -> "PlainStep":
        """Wipe the blocks that this step begins, and plan its attention."""
        if inputs.begun_blocks is not None:
            kv.wipe(inputs.begun_blocks)
        return PlainStep(spec=self._spec, rotary=self._rotary, inputs=inputs, kv=kv, lora=lora)


class PlainStep:
    """One step in plain torch."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        rotary: RotaryTable,
        inputs: StepInputs,
        kv: KVStorage,
        lora: LoraStep | None,
    ) -> None:
        self._spec = spec
        self._rotary = rotary
        self._rotary_rows = rotary.rows(inputs.positions)
        self._kv_slots = inputs.kv_slots
        self._kv = kv
        self._attention = plan_attention(inputs.chunks, kv)
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
        """Add, then norm each row."""
        return rms_norm(residual.add_(y), weight, self._spec.rms_norm_eps)

    def attend(
        self, qkv: torch.Tensor, *, layer: int, qk_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend by gathering each sequence's blocks."""
        spec = self._spec
        num_qk_heads = spec.num_heads + spec.num_kv_heads
        heads = qkv.view(-1, num_qk_heads + spec.num_kv_heads, spec.head_dim)
        # q and k stand side by side, so that both are normed and turned in one go.
        qk = heads[:, :num_qk_heads]
        if qk_norm is not None:
            qk = rms_norm(qk, qk_norm, spec.rms_norm_eps)
        qk = self._rotary.rotate(qk, self._rotary_rows)
        k, v = qk[:, spec.num_heads :], heads[:, num_qk_heads:]
        self._kv.write(layer, self._kv_slots, k, v)
        return attend(qk[:, : spec.num_heads], self._kv, layer, self._attention)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Multiply the halves."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, *, module: str, layer: int) -> None:
        """Add the adapters' parts; nothing where the step carries none."""
        if self._lora is not None:
            arena, plan = self._lora.arena, self._lora.plan
            add_lora(y, x, arena=arena, module=module, layer=layer, plan=plan)
