"""One decoder layer: attention and SwiGLU, each behind a norm and added to the residual."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from engine.kvcache.storage import KVStorage
from engine.model.attention import AttentionPlan, attend
from engine.model.inputs import LoraStep, StepInputs
from engine.model.linear import PackedLinear
from engine.model.rotary import RotaryTable
from engine.model.spec import ModelSpec
from punica_kernels.dispatch import add_lora


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The tensors of one layer.

    qk_norm   [num_heads + num_kv_heads, head_dim], the q rows first; None without q/k norm
    """

    input_norm: torch.Tensor  # [hidden]
    qkv: PackedLinear
    qk_norm: torch.Tensor | None
    o: PackedLinear
    post_attention_norm: torch.Tensor  # [hidden]
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What every layer of a step shares."""

    inputs: StepInputs
    kv: KVStorage
    attention: AttentionPlan
    rotary: RotaryTable
    rotary_rows: tuple[torch.Tensor, torch.Tensor]
    lora: LoraStep | None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) · weight over the last dimension, the first factor in fp32.

    It is rounded to x's format before the weight comes in, as the checkpoints were trained.
    """
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


class DecoderLayer:
    """Layer `index` of a decoder: four base products, and LoRA added to each where asked."""

    __slots__ = ("_index", "_spec", "weights")

    def __init__(self, *, index: int, spec: ModelSpec, weights: LayerWeights) -> None:
        self._index = index
        self._spec = spec
        self.weights = weights

    def forward(self, residual: torch.Tensor, step: StepContext) -> None:
        """Add this layer's two halves to `residual` [num_tokens, hidden], in place."""
        weights, eps = self.weights, self._spec.rms_norm_eps
        residual.add_(self._attention(rms_norm(residual, weights.input_norm, eps), step))
        residual.add_(self._mlp(rms_norm(residual, weights.post_attention_norm, eps), step))

    def _attention(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        spec = self._spec
        qkv = self._product("qkv", self.weights.qkv, x, step)
        num_qk_heads = spec.num_heads + spec.num_kv_heads
        heads = qkv.view(-1, num_qk_heads + spec.num_kv_heads, spec.head_dim)
        # q and k stand side by side, so that both are normed and turned in one go.
        qk = heads[:, :num_qk_heads]
        if self.weights.qk_norm is not None:
            qk = rms_norm(qk, self.weights.qk_norm, spec.rms_norm_eps)
        qk = step.rotary.rotate(qk, step.rotary_rows)
        step.kv.write(
            self._index,
            step.inputs.kv_slots,
            qk[:, spec.num_heads :],
            heads[:, num_qk_heads:],
        )
        attended = attend(qk[:, : spec.num_heads], step.kv, self._index, step.attention)
        return self._product("o", self.weights.o, attended, step)

    def _mlp(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        gate, up = self._product("gate_up", self.weights.gate_up, x, step).chunk(2, dim=-1)
        return self._product("down", self.weights.down, F.silu(gate).mul_(up), step)

    def _product(
        self, module: str, linear: PackedLinear, x: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        y = linear.product(x)
        if step.lora is not None:
            add_lora(
                y,
                x,
                arena=step.lora.arena,
                module=module,
                layer=self._index,
                plan=step.lora.plan,
            )
        return y
