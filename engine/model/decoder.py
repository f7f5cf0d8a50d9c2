"""The decoder of the Llama family: embedding, layers, final norm, head."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from engine.kvcache.storage import KVStorage
from engine.model.inputs import LoraStep, StepInputs
from engine.model.layers import DecoderLayer, LayerWeights
from engine.model.linear import BaseLinear, PackedLinear, prepack
from engine.model.rotary import RotaryTable
from engine.model.spec import ModelSpec
from engine.model.step_kernels import KernelStep, PlainKernels, StepKernels
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
        head: BaseLinear,  # its weight is `embedding` itself where the two are tied
        max_model_len: int,
        make_kernels: Callable[[ModelSpec, RotaryTable], StepKernels] = PlainKernels,
    ) -> None:
        assert len(layers) == spec.num_layers, "one set of weights a layer"
        self.spec = spec
        self.embedding = embedding
        self.final_norm = final_norm
        self.lm_head = head
        self.layers = tuple(
            DecoderLayer(index=index, weights=weights) for index, weights in enumerate(layers)
        )
        # Before each layer, and after the last.
        self._norms = [weights.input_norm for weights in layers] + [final_norm]
        rotary = RotaryTable(
            spec, max_model_len=max_model_len, dtype=embedding.dtype, device=embedding.device
        )
        self.kernels = make_kernels(spec, rotary)

    def forward(
        self, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None
    ) -> torch.Tensor:  # [num_tokens, hidden]
        """Compute a step's hidden states after the final norm; its K and V go into `kv`.

        The result lives in a buffer of the kernels until the next step.
        """
        return self.run(self.kernels.begin(inputs, kv, lora), inputs.token_ids, lora)

    def run(
        self,
        step: KernelStep,
        token_ids: torch.Tensor,  # [num_tokens]
        lora: LoraStep | None,
    ) -> torch.Tensor:  # [num_tokens, hidden]
        """Do what `forward` does, with a step that has begun already."""
        residual = F.embedding(token_ids, self.embedding)
        if lora is not None:
            add_lora_embedding(residual, token_ids, arena=lora.arena, plan=lora.plan)
        x = step.rms_norm(residual, self._norms[0])
        for layer, next_norm in zip(self.layers, self._norms[1:], strict=True):
            x = layer.forward(x, residual, step, next_norm=next_norm, has_lora=lora is not None)
        return x

    def prepack(self) -> int:
        """Lay the weights out as the matrix library likes them best, and drop the plain ones.

        Returns how many of the products use the library's layout: none where it can't be had. A
        head that is tied to the embedding keeps the plain weight, too.
        """
        self.lm_head = self._prepacked(self.lm_head)
        for layer in self.layers:
            weights = layer.weights
            layer.weights = replace(
                weights,
                qkv=self._prepacked(weights.qkv),
                o=self._prepacked(weights.o),
                gate_up=self._prepacked(weights.gate_up),
                down=self._prepacked(weights.down),
            )
        return sum(not isinstance(linear, PackedLinear) for linear in self.linears())

    def linears(self) -> list[BaseLinear]:
        """Return every product of a step, the head first."""
        linears = [self.lm_head]
        for layer in self.layers:
            weights = layer.weights
            linears += [weights.qkv, weights.o, weights.gate_up, weights.down]
        return linears

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
        """Return every plain tensor of the model once; a tied head is its embedding."""
        tensors = [self.embedding, self.final_norm]
        for layer in self.layers:
            weights = layer.weights
            tensors += [weights.input_norm, weights.post_attention_norm]
            tensors += [] if weights.qk_norm is None else [weights.qk_norm]
        for linear in self.linears():
            if isinstance(linear, PackedLinear):
                tensors += [] if linear.weight is self.embedding else [linear.weight]
                tensors += [] if linear.bias is None else [linear.bias]
        return tensors

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all weights, however they are laid out."""
        plain = sum(tensor.nbytes for tensor in self.weight_tensors())
        laid_out = [one for one in self.linears() if not isinstance(one, PackedLinear)]
        return plain + sum(linear.num_bytes for linear in laid_out)

    def _prepacked(self, linear: BaseLinear) -> BaseLinear:
        return (
            prepack(linear, self.kernels.lay_over) if isinstance(linear, PackedLinear) else linear
        )
