"""Turns the plan of a step into logits; the one place where decisions meet tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.kvcache.storage import KVStorage
from engine.model.cuda_graphs import DecodeGraphs
from engine.model.decoder import Decoder
from engine.model.inputs import LoraStep, StepInputs, build_inputs
from engine.scheduler.plan import StepPlan
from punica_kernels.arena import Arena
from punica_kernels.plan import build_plan

PROMPT_TILE_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTile:
    """Logits of some tokens of a prompt; row i says what may follow token start + i.

    position   of the chunk in its plan
    logits     [num_rows, vocab] in fp32
    """

    position: int
    start: int
    logits: torch.Tensor


class ModelRunner:
    """Runs one step at a time over the KV storage and the arena that it was given.

    Owns no decision: which tokens are computed, and where their K and V go, is in the plan.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        kv: KVStorage,
        arena: Arena | None,
        graphs: DecodeGraphs[Any] | None = None,
    ) -> None:
        self.decoder = decoder
        self.kv = kv
        self.arena = arena
        self.graphs = graphs

    @property
    def device(self) -> torch.device:
        """Where the steps run."""
        return self.kv.k.device

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, *, on_prompt_logits: Callable[[PromptTile], None] | None = None
    ) -> torch.Tensor | None:
        """Compute every chunk of `plan`; return logits [num_draws, vocab] in fp32.

        One row for each of the chunks' drawn_samples, in the order of the plan; None if there is
        none. Logits of prompts that a chunk asks for are handed over a tile at a time: those of
        all its rows at once could be larger than the model.
        """
        for copy in plan.block_copies:
            self.kv.copy_block(source=copy.source, target=copy.target)
        inputs = self.inputs_of(plan)
        lora = self.lora_step_of(plan)
        hidden = None if self.graphs is None else self.graphs.forward(inputs, lora)
        if hidden is None:
            hidden = self.decoder.forward(inputs, self.kv, lora)
        if on_prompt_logits is not None:
            self._hand_over_prompts(plan, inputs, hidden, lora, on_prompt_logits)
        if inputs.sampled_rows.numel() == 0:
            return None
        head_lora = None if lora is None else lora.for_head(_sampled_rows(plan, inputs))
        return self.decoder.head(hidden[inputs.sampled_rows], head_lora)

    def _hand_over_prompts(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        hidden: torch.Tensor,  # [num_tokens, hidden]
        lora: LoraStep | None,
        on_prompt_logits: Callable[[PromptTile], None],
    ) -> None:
        for position, (chunk, rows) in enumerate(zip(plan.chunks, inputs.chunks, strict=True)):
            for first in range(0, chunk.num_prompt_logits, PROMPT_TILE_ROWS):
                num_rows = min(PROMPT_TILE_ROWS, chunk.num_prompt_logits - first)
                row0 = rows.row0 + first
                wanted = range(row0, row0 + num_rows)
                head_lora = None if lora is None else lora.for_head(wanted)
                on_prompt_logits(
                    PromptTile(
                        position=position,
                        start=chunk.start + first,
                        logits=self.decoder.head(hidden[row0 : row0 + num_rows], head_lora),
                    )
                )

    def inputs_of(self, plan: StepPlan) -> StepInputs:
        """Flatten `plan` into the tensors of one step."""
        return build_inputs(plan, block_size=self.kv.block_size, device=self.device)

    def lora_step_of(self, plan: StepPlan) -> LoraStep | None:
        """Return what the decoder needs to add adapters, or None if the step carries none."""
        if self.arena is None:
            return None
        lora_plan = build_plan(
            [chunk.lora_index for chunk in plan.chunks],
            [chunk.num_tokens for chunk in plan.chunks],
        )
        return None if lora_plan is None else LoraStep(arena=self.arena, plan=lora_plan)


def _sampled_rows(plan: StepPlan, inputs: StepInputs) -> list[int]:
    """Return what is in inputs.sampled_rows, without asking the device."""
    return [
        rows.row0 + rows.num_tokens - 1
        for chunk, rows in zip(plan.chunks, inputs.chunks, strict=True)
        for _ in chunk.drawn_samples
    ]
