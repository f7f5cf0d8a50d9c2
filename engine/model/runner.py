"""Turns the plan of a step into logits; the one place where decisions meet tensors."""

import torch

from engine.kvcache.storage import KVStorage
from engine.model.decoder import Decoder
from engine.model.inputs import LoraStep, StepInputs, build_inputs
from engine.scheduler.plan import StepPlan
from punica_kernels.arena import Arena
from punica_kernels.plan import build_plan


class ModelRunner:
    """Runs one step at a time over the KV storage and the arena that it was given.

    Owns no decision: which tokens are computed, and where their K and V go, is in the plan.
    """

    def __init__(self, *, decoder: Decoder, kv: KVStorage, arena: Arena | None) -> None:
        self.decoder = decoder
        self.kv = kv
        self.arena = arena

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> torch.Tensor | None:
        """Compute every chunk of `plan`; return logits [num_sampled, vocab] in fp32.

        One row for each chunk that samples, in the order of the plan; None if none does.
        """
        inputs = self.inputs_of(plan)
        hidden = self.decoder.forward(inputs, self.kv, self.lora_step_of(plan))
        if inputs.sampled_rows.numel() == 0:
            return None
        return self.decoder.head(hidden[inputs.sampled_rows])

    def inputs_of(self, plan: StepPlan) -> StepInputs:
        """Flatten `plan` into the tensors of one step."""
        return build_inputs(plan, block_size=self.kv.block_size, device=self.kv.k.device)

    def lora_step_of(self, plan: StepPlan) -> LoraStep | None:
        """Return what the decoder needs to add adapters, or None if the step carries none."""
        if self.arena is None:
            return None
        lora_plan = build_plan(
            [chunk.lora_index for chunk in plan.chunks],
            [chunk.num_tokens for chunk in plan.chunks],
        )
        return None if lora_plan is None else LoraStep(arena=self.arena, plan=lora_plan)
