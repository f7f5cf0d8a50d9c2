"""Real published configs: PEFT builds an adapter from each, and ours serves it with that very file.

One tiny Llama carries them all; beside them run the base, a rank of 4 and a rank of 512. A layer's
number that it doesn't have means no module, to PEFT and to us.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from engine.llm import LLM
from engine.protocol import SamplingParams
from tests.adapters.test_corpus import CORPUS, files_of
from tests.end_to_end.grades import GradeE1
from tests.end_to_end.peft_reference import BASE, PeftReference, save_word_tokenizer

pytestmark = pytest.mark.slow

NUM_LAYERS, VOCAB = 4, 128
NUM_TOKENS = 3
RANKS = {
    "rank-4": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]},
    "rank-512": {"r": 512, "lora_alpha": 64, "target_modules": "all-linear"},
}


def is_carried(file: str) -> bool:
    """Whether a tiny Llama may carry it: not if the config itself names another class."""
    mapping = json.loads((CORPUS / file).read_text()).get("auto_mapping") or {}
    return "Llama" in (mapping.get("base_model_class") or "Llama")


FILES = [file for file in files_of("apply") if is_carried(file)]


@dataclass
class World:
    """Our engine with every adapter loaded by its file's name, and PEFT's model with the same."""

    llm: LLM
    reference: PeftReference


def peft_config(raw: dict) -> LoraConfig:
    """Return PEFT's own reading of a file, less the keys that this PEFT doesn't know."""
    known = {field.name for field in dataclasses.fields(LoraConfig)} - {"runtime_config"}
    config = LoraConfig(**{key: value for key, value in raw.items() if key in known})
    config.inference_mode, config.base_model_name_or_path = False, None
    return config


def save_base(directory: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    model.save_pretrained(directory)
    save_word_tokenizer(directory, num_words=VOCAB)
    return model


def peft_model(base: LlamaForCausalLM, configs: dict[str, LoraConfig]) -> PeftModel:
    """Put all adapters on one model, with random factors on both sides."""
    names = list(configs)
    model = get_peft_model(base, configs[names[0]], adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, configs[name])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("corpus")
    raws = {file: json.loads((CORPUS / file).read_text()) for file in FILES}
    # A dot in an adapter's name would look like a level of modules to PEFT.
    names = {file: file.removesuffix(".json").replace(".", "-") for file in FILES}
    configs = {names[file]: peft_config(raw) for file, raw in raws.items()}
    configs |= {name: LoraConfig(**fields) for name, fields in RANKS.items()}
    model = peft_model(save_base(root / "base"), configs)
    model.save_pretrained(root / "adapters", selected_adapters=list(configs))
    for file, name in names.items():
        # The published bytes in the place of what PEFT made of them.
        (root / "adapters" / name / "adapter_config.json").write_bytes((CORPUS / file).read_bytes())
    with LLM(
        str(root / "base"),
        state_dir=str(root / "state"),
        dtype="fp32",
        num_threads=1,
        kernels="torch",
    ) as llm:
        for name in configs:
            llm.load_adapter(name, root / "adapters" / name)
        yield World(llm, PeftReference.around(model))


def test_most_of_the_corpus_is_carried() -> None:
    assert len(FILES) >= 30


def test_every_config_that_is_applied_is_what_peft_says(world: World) -> None:
    names = [BASE, *world.reference.names]
    prompts = [[3 + (11 * n + 29 * place) % 120 for place in range(4 + n % 5)] for n in range(40)]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    grade = GradeE1(world.reference)

    once = SamplingParams(max_tokens=1)
    world.llm.generate(
        [prompts[0]] * len(names), once, lora_ids=names
    )  # makes all of them resident
    completions = world.llm.generate(prompts[: len(names)], params, lora_ids=names)

    assert len(names) == len(FILES) + len(RANKS) + 1
    for name, completion in zip(names, completions, strict=True):
        grade.check(world.llm, completion, name=name, lora_id=name)
    assert grade.excuses == []
    assert world.llm.status().max_adapters_in_step == len(names) - 1
    assert {"rank-4", "rank-512"} <= set(names)


def test_adapters_of_the_corpus_differ_from_the_base(world: World) -> None:
    prompt = [5, 50, 100, 23]
    base = world.reference.logits(prompt, name=BASE)
    for name in world.reference.names:
        gap = (world.reference.logits(prompt, name=name) - base).abs().max()
        assert gap > 0.1, name
