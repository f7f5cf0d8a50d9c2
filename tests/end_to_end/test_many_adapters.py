"""64 adapters in one engine: each answers as it does alone, whether the arena holds all or few."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.llm import LLM
from engine.protocol import AddRequest, SamplingParams, SequenceOutput, StepDone
from tests.end_to_end.grades import MAX_LOGIT_GAP, GradeE1
from tests.end_to_end.peft_reference import PeftReference, save_random_adapter, save_tiny_llama

pytestmark = pytest.mark.slow

NUM_ADAPTERS = 64
NUM_TOKENS = 16
MAX_MODEL_LEN = 128
MIB = 1024**2
RANKS = [4, 16, 24, 40]
TARGETS = ["all-linear", ["q_proj", "v_proj"], ["o_proj", "gate_proj", "down_proj"]]
# An arena row of this model, over all layers and groups, is 17.5 KiB. The adapters need 1,344 rows
# of each group. What a step takes beside them is measured, and varies by a MiB or two.
ROOMY_BYTES, TIGHT_BYTES = 256 * MIB, 8 * MIB


@dataclass(kw_only=True)
class Answer:
    """What one request has brought so far; logprobs of the sampled tokens and the runner-up."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list] = field(default_factory=list)

    def take(self, output: SequenceOutput) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The tiny base and 64 adapters of mixed ranks and targets, by lora_id."""
    root = tmp_path_factory.mktemp("many")
    save_tiny_llama(root / "base")
    folders = {}
    for number in range(NUM_ADAPTERS):
        folder = root / f"adapter-{number}"
        rank = RANKS[number % len(RANKS)]
        save_random_adapter(
            root / "base",
            folder,
            seed=number,
            r=rank,
            lora_alpha=2 * rank,
            target_modules=TARGETS[number % len(TARGETS)],
        )
        folders[f"adapter-{number}@{number:012x}"] = folder
    return root / "base", folders


def prompt_of(number: int) -> list[int]:
    """Some prompts are equal, so that adapters could share blocks if only tokens counted."""
    generator = random.Random(number % 5)
    return [generator.randrange(3, 512) for _ in range(7 + 9 * (number % 5))]


def engine(base_dir, state_dir, *, memory_bytes: int) -> LLM:
    return LLM(
        str(base_dir),
        state_dir=str(state_dir),
        dtype="fp32",
        num_threads=1,
        memory_bytes=memory_bytes,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        max_tokens_per_step=64,
    )


PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, num_logprobs=2)


def add(llm: LLM, lora_id: str, number: int) -> None:
    command = AddRequest(
        request_id=lora_id, prompt_ids=prompt_of(number), params=PARAMS, lora_id=lora_id
    )
    assert llm.core.handle(command) == []


@dataclass(kw_only=True)
class Run:
    """All requests at once, step by step; what happened in steps that others decoded in."""

    answers: dict[str, Answer] = field(default_factory=dict)
    num_steps_with_load: int = 0
    num_steps_with_eviction: int = 0

    def go(self, llm: LLM) -> None:
        open_ids = set(self.answers)
        while open_ids:
            before, num_running = llm.status(), llm.core.scheduler.num_running
            events = llm.core.step()
            after = llm.status()
            if num_running:
                self.num_steps_with_load += after.num_adapter_loads > before.num_adapter_loads
                self.num_steps_with_eviction += (
                    after.num_adapter_evictions > before.num_adapter_evictions
                )
            for event in events:
                assert isinstance(event, StepDone), event
                for output in event.outputs:
                    self.answers[output.request_id].take(output)
                    if output.finish_reason is not None:
                        open_ids.remove(output.request_id)


def interleaved(llm: LLM, lora_ids: list[str]) -> Run:
    run = Run(answers={lora_id: Answer() for lora_id in lora_ids})
    shuffled = list(enumerate(lora_ids))
    random.Random(0).shuffle(shuffled)
    for number, lora_id in shuffled:
        add(llm, lora_id, number)
    run.go(llm)
    return run


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory):
    """Each adapter's answer while no other is loaded; every eighth is graded against PEFT."""
    base_dir, folders = world
    graded = dict(list(folders.items())[::8])
    base = LlamaForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    grade = GradeE1(PeftReference(base, {one.split("@")[0]: graded[one] for one in graded}))
    answers = {}
    state_dir = tmp_path_factory.mktemp("alone")
    with engine(base_dir, state_dir, memory_bytes=ROOMY_BYTES) as llm:
        for number, (lora_id, folder) in enumerate(folders.items()):
            llm.load_adapter(lora_id, folder)
            (completion,) = llm.generate([prompt_of(number)], PARAMS, lora_ids=[lora_id])
            answers[lora_id] = Answer(token_ids=completion.token_ids, logprobs=completion.logprobs)
            if lora_id in graded:
                grade.check(llm, completion, name=lora_id.split("@")[0], lora_id=lora_id)
            llm.unload_adapter(lora_id)
    assert grade.excuses == []
    return answers


def assert_alike(mixed: Answer, alone: Answer) -> None:
    """E1 between two runs: equal tokens, log-probabilities as close as logits have to be."""
    assert mixed.token_ids == alone.token_ids
    assert len(mixed.logprobs) == len(alone.logprobs) == NUM_TOKENS
    for ours, theirs in zip(mixed.logprobs, alone.logprobs, strict=True):
        gaps = [abs(a.logprob - b.logprob) for a, b in zip(ours, theirs, strict=True)]
        assert max(gaps) <= MAX_LOGIT_GAP


def test_64_adapters_interleaved_answer_as_each_alone(world, alone, tmp_path):
    base_dir, folders = world
    with engine(base_dir, tmp_path, memory_bytes=ROOMY_BYTES) as llm:
        for lora_id, folder in folders.items():
            llm.load_adapter(lora_id, folder)
        run = interleaved(llm, list(folders))
        status = llm.status()

    for lora_id, answer in run.answers.items():
        assert_alike(answer, alone[lora_id])
    assert status.max_adapters_in_step >= 8
    assert status.num_adapter_evictions == 0
    assert status.num_adapter_loads == NUM_ADAPTERS


def test_arena_that_holds_few_of_64_adapters_changes_no_answer(world, alone, tmp_path):
    """Rows are loaded and evicted while others decode; in the end nothing is held."""
    base_dir, folders = world
    with engine(base_dir, tmp_path, memory_bytes=TIGHT_BYTES) as llm:
        for lora_id, folder in folders.items():
            llm.load_adapter(lora_id, folder)
        # Two rounds, so that evicted versions come back.
        runs = [interleaved(llm, list(folders)) for _ in range(2)]
        status = llm.status()
        llm.core.check_invariants()
        for lora_id in folders:
            llm.unload_adapter(lora_id)
        llm.core.step()
        llm.core.check_invariants()
        after = llm.status()

    for run in runs:
        for lora_id, answer in run.answers.items():
            assert_alike(answer, alone[lora_id])
        assert run.num_steps_with_load > 0
        assert run.num_steps_with_eviction > 0
    assert status.max_adapters_in_step > 1
    assert status.num_adapter_evictions > NUM_ADAPTERS // 2
    assert status.num_adapter_loads > NUM_ADAPTERS
    assert status.num_free_blocks == status.num_blocks
    assert all(one.num_leases == one.num_claims == 0 for one in status.adapters)
    assert after.adapters == []
    assert after.free_lora_rows == after.lora_rows
    assert list(tmp_path.rglob("*.arena")) == []
