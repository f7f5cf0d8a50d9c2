"""The decoder of the Llama family: embedding, layers, final norm, head."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from engine.kvcache.storage import KVStorage
from engine.model.attention import plan_attention
from engine.model.inputs import LoraStep, StepInputs
from engine.model.layers import DecoderLayer, LayerWeights, StepContext, rms_norm
from engine.model.linear import PackedLinear
from engine.model.rotary import RotaryTable
from engine.model.spec import ModelSpec
from punica_kernels.dispatch import add_lora, add_lora_embedding


class Decoder:
    """One base model's weights and arithmetic; holds no state of any sequence.

    A step makes num_layers · 4 + 1 base products whatever the batch. The caller holds
    torch.inference_mode.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        embedding: torch.Tensor,  # [vocab, hidden]
        layers: Sequence[LayerWeights],
        final_norm: torch.Tensor,  # [hidden]
        head: PackedLinear,  # its weight is `embedding` itself where the two are tied
        max_model_len: int,
    ) -> None:
        assert len(layers) == spec.num_layers, "one set of weights a layer"
        self.spec = spec
        self.embedding = embedding
        self.final_norm = final_norm
        self.lm_head = head
        self.layers = tuple(
            DecoderLayer(index=index, spec=spec, weights=weights)
            for index, weights in enumerate(layers)
        )
        self._rotary = RotaryTable(
            spec, max_model_len=max_model_len, dtype=embedding.dtype, device=embedding.device
        )

    def forward(
        self, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None
    ) -> torch.Tensor:  # [num_tokens, hidden]
        """Compute a step's hidden states after the final norm; its K and V go into `kv`."""
        if inputs.begun_blocks is not None:
            kv.wipe(inputs.begun_blocks)
        step = StepContext(
            inputs=inputs,
            kv=kv,
            attention=plan_attention(inputs, kv),
            rotary=self._rotary,
            rotary_rows=self._rotary.rows(inputs.positions),
            lora=lora,
        )
        residual = F.embedding(inputs.token_ids, self.embedding)
        if lora is not None:
            add_lora_embedding(residual, inputs.token_ids, arena=lora.arena, plan=lora.plan)
        for layer in self.layers:
            layer.forward(residual, step)
        return rms_norm(residual, self.final_norm, self.spec.rms_norm_eps)

    def head(
        self,
        hidden_rows: torch.Tensor,  # [n, hidden]
        lora: LoraStep | None,
    ) -> torch.Tensor:  # [n, vocab] fp32
        """Return the logits of some rows of `forward`'s result.

        lora  of these rows, as LoraStep.for_head makes it; not the step's own
        """
        logits = self.lm_head.product(hidden_rows).float()
        if lora is not None:
            add_lora(logits, hidden_rows, arena=lora.arena, module="head", layer=0, plan=lora.plan)
        return logits

    def weight_tensors(self) -> list[torch.Tensor]:
        """Return every tensor of the model once; a tied head is its embedding."""
        tensors = [self.embedding, self.final_norm]
        linears = [self.lm_head]
        for layer in self.layers:
            weights = layer.weights
            tensors += [weights.input_norm, weights.post_attention_norm]
            tensors += [] if weights.qk_norm is None else [weights.qk_norm]
            linears += [weights.qkv, weights.o, weights.gate_up, weights.down]
        for linear in linears:
            if linear.weight is not self.embedding:
                tensors.append(linear.weight)
            if linear.bias is not None:
                tensors.append(linear.bias)
        return tensors
