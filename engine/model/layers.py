"""One decoder layer: attention and SwiGLU, each behind a norm and added to the residual."""

from dataclasses import dataclass

import torch

from engine.model.linear import BaseLinear
from engine.model.step_kernels import KernelStep


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The tensors of one layer.

    qk_norm   [num_heads + num_kv_heads, head_dim], the q rows first; None without q/k norm
    """

    input_norm: torch.Tensor  # [hidden]
    qkv: BaseLinear
    qk_norm: torch.Tensor | None
    o: BaseLinear
    post_attention_norm: torch.Tensor  # [hidden]
    gate_up: BaseLinear
    down: BaseLinear


class DecoderLayer:
    """Layer `index` of a decoder: four base products, and LoRA added to each where asked."""

    __slots__ = ("_index", "weights")

    def __init__(self, *, index: int, weights: LayerWeights) -> None:
        self._index = index
        self.weights = weights

    def forward(
        self,
        x: torch.Tensor,  # [num_tokens, hidden], normed for this layer
        residual: torch.Tensor,  # [num_tokens, hidden]
        step: KernelStep,
        *,
        next_norm: torch.Tensor,  # [hidden]
        has_lora: bool,
    ) -> torch.Tensor:  # [num_tokens, hidden]
        """Add this layer's two halves to `residual` in place; return it normed by `next_norm`.

        Without adapters in the step no LoRA call is made.
        """
        weights, layer = self.weights, self._index
        qkv = step.product(weights.qkv, x, module="qkv", layer=layer)
        if has_lora:
            step.add_lora(qkv, x, module="qkv", layer=layer)
        x = step.attend(qkv, layer=layer, qk_norm=weights.qk_norm)
        y = step.product(weights.o, x, module="o", layer=layer)
        if has_lora:
            step.add_lora(y, x, module="o", layer=layer)
        x = step.add_rms_norm(residual, y, weights.post_attention_norm)
        gate_up = step.product(weights.gate_up, x, module="gate_up", layer=layer)
        if has_lora:
            step.add_lora(gate_up, x, module="gate_up", layer=layer)
        x = step.silu_mul(gate_up)
        y = step.product(weights.down, x, module="down", layer=layer)
        if has_lora:
            step.add_lora(y, x, module="down", layer=layer)
        return step.add_rms_norm(residual, y, next_norm)
