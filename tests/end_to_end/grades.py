"""Grades E1 and E2: what it means that our tokens are the reference's."""

from dataclasses import dataclass, field

import torch

from engine.llm import LLM, Completion
from engine.model.inputs import StepInputs
from engine.protocol import SamplingParams
from engine.scheduler.plan import Chunk, StepPlan
from engine.sequence import Sequence
from tests.end_to_end.peft_reference import PeftReference

MAX_LOGIT_GAP = 1e-3


@dataclass
class GradeE1:
    """Compares completions with the reference's; remembers gaps and excuses."""

    reference: PeftReference
    largest_gap: float = 0.0
    excuses: list[str] = field(default_factory=list)
    _theirs: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)

    def logits(self, token_ids: list[int], *, name: str | None) -> torch.Tensor:
        """Return the reference's logits [num_tokens, vocab]; computed once."""
        key = (name, *token_ids)
        if key not in self._theirs:
            self._theirs[key] = self.reference.logits(token_ids, name=name)
        return self._theirs[key]

    def check(self, llm: LLM, completion: Completion, *, name: str | None, lora_id: str | None):
        """Assert E1 for one completion that was generated with `name` applied."""
        ids = completion.prompt_ids + completion.token_ids
        theirs = self.logits(ids, name=name)
        gap = float((teacher_forced_logits(llm, ids, lora_id) - theirs).abs().max())
        self.largest_gap = max(self.largest_gap, gap)

        assert gap <= MAX_LOGIT_GAP, f"logit gap {gap:.2e} with adapter {name}"

        # Up to the first token that differs, the text is what the reference would have written
        # too, so that its logits are those of its own greedy run.
        first_row = len(completion.prompt_ids) - 1
        expected = theirs[first_row:-1].argmax(-1).tolist()
        if expected == completion.token_ids:
            return
        num_tokens = len(expected)
        first = next(i for i in range(num_tokens) if expected[i] != completion.token_ids[i])
        top_two = theirs[first_row + first].topk(2).values
        margin = float(top_two[0] - top_two[1])

        assert margin < 2 * gap, (
            f"token {first} with adapter {name}: {completion.token_ids[first]} for "
            f"{expected[first]}, margin {margin:.2e}, gap {gap:.2e}"
        )
        self.excuses.append(f"adapter {name}, token {first}: margin {margin:.2e}, gap {gap:.2e}")

    def check_logprobs(self, completion: Completion, *, name: str | None):
        """Assert that each token was drawn from the reference's logits, within E1.

        These come from the very step that drew it: beside others, over cached blocks.
        """
        ids = completion.prompt_ids + completion.token_ids
        theirs = self.logits(ids, name=name).log_softmax(-1)
        first = len(completion.prompt_ids) - 1
        for i, entries in enumerate(completion.logprobs):
            gap = abs(entries[0].logprob - float(theirs[first + i, completion.token_ids[i]]))
            assert gap <= 2 * MAX_LOGIT_GAP, f"token {i} with adapter {name}: logprob gap {gap:.2e}"


@dataclass
class GradeE2:
    """Counts on how many tokens we and the reference agree, both in bf16 with the same text.

    Logits in bf16 are often equal, and which of the likeliest comes first is the index's doing. So
    both agree where some token is among the likeliest for both.
    """

    reference: PeftReference
    largest_gap: float = 0.0
    num_tokens: int = 0
    num_agreed: int = 0
    margins: list[float] = field(default_factory=list)

    @property
    def agreement(self) -> float:
        return self.num_agreed / self.num_tokens

    def check(self, llm: LLM, token_ids: list[int], *, name: str | None, lora_id: str | None):
        """Compare what both would say after each token; remember where they part."""
        theirs = self.reference.logits(token_ids, name=name)
        ours = teacher_forced_logits(llm, token_ids, lora_id)
        self.largest_gap = max(self.largest_gap, float((ours - theirs).abs().max()))
        both = (ours == ours.amax(-1, keepdim=True)) & (theirs == theirs.amax(-1, keepdim=True))
        differs = ~both.any(dim=-1)
        self.num_tokens += len(token_ids)
        self.num_agreed += int((~differs).sum())
        top_two = theirs[differs].topk(2, dim=-1).values
        self.margins += (top_two[:, 0] - top_two[:, 1]).tolist()

    def __str__(self) -> str:
        margins = ", ".join(f"{margin:.3f}" for margin in self.margins)
        return (
            f"{self.num_agreed} of {self.num_tokens} tokens agree, largest logit gap "
            f"{self.largest_gap:.3f}, the reference's margins where they don't: [{margins}]"
        )


@torch.inference_mode()
def teacher_forced_logits(llm: LLM, token_ids: list[int], lora_id: str | None) -> torch.Tensor:
    """Return our logits [num_tokens, vocab] of a whole sequence, through arena and paged KV."""
    core = llm.core
    lease = None
    if lora_id is not None:
        residency = core.adapters.residency
        residency.claim(lora_id)
        while (lease := residency.lease(lora_id)) is None:
            core.step()
        residency.unclaim(lora_id)
    sequence = Sequence(
        request_id="teacher",
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(max_tokens=1),
        seed=0,
        eos_token_ids=(),
    )
    assert core.scheduler.cache.extend(sequence, len(token_ids))
    chunk = Chunk(
        sequence=sequence,
        start=0,
        num_tokens=len(token_ids),
        samples=True,
        lora_index=None if lease is None else lease.lora_index,
    )
    plan = StepPlan(chunks=(chunk,))
    inputs: StepInputs = core.runner.inputs_of(plan)
    lora = core.runner.lora_step_of(plan)
    hidden = core.runner.decoder.forward(inputs, core.runner.kv, lora)
    head_lora = None if lora is None else lora.for_head(range(len(token_ids)))
    logits = core.runner.decoder.head(hidden, head_lora)
    core.scheduler.cache.release(sequence)
    if lease is not None:
        core.adapters.residency.release(lease)
    return logits.cpu()
