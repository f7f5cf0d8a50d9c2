"""LoRA on the embedding and on the head, tied and untied, is what PEFT says."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import LlamaForCausalLM

from engine.errors import AdapterRefused
from engine.llm import LLM
from engine.protocol import CallDone, ProbeAdapter, ProbeResult, SamplingParams
from tests.end_to_end.grades import GradeE1
from tests.end_to_end.peft_reference import (
    BASE,
    PeftReference,
    save_random_adapter,
    save_tiny_llama,
)

WEIGHTS = "adapter_model.safetensors"
NUM_TOKENS = 12
ADAPTERS = {
    "embedding": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens"]},
    "head": {"r": 8, "lora_alpha": 8, "target_modules": ["lm_head"]},
    "both": {"r": 5, "lora_alpha": 15, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "patterns": {
        "r": 4,
        "target_modules": r".*(embed_tokens|lm_head|v_proj)",
        "rank_pattern": {"lm_head": 9},
        "alpha_pattern": {"embed_tokens": 2},
        "use_rslora": True,
    },
    "layers": {"r": 6, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]},
}
pytestmark = [
    pytest.mark.slow,
    # PEFT says that LoRA on a tied matrix touches one side only, and that it saves the matrix.
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]


@dataclass
class Tiny:
    """A base, adapters by name, PEFT's view of them, and ours."""

    directories: dict[str, Path]
    reference: PeftReference
    llm: LLM


@pytest.fixture(scope="module", params=["tied", "untied"])
def tiny(request, tmp_path_factory) -> Iterator[Tiny]:
    root = tmp_path_factory.mktemp(request.param)
    save_tiny_llama(root / "base", tied=request.param == "tied")
    directories = {}
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        directories[name] = root / name
        save_random_adapter(root / "base", root / name, seed=seed, **config)
    base = LlamaForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    reference = PeftReference(base, directories)
    with LLM(
        str(root / "base"),
        state_dir=str(root / "state"),
        dtype="fp32",
        num_threads=1,
        max_tokens_per_step=48,
    ) as llm:
        for name, directory in directories.items():
            llm.load_adapter(name, directory)
        yield Tiny(directories, reference, llm)


def prompts(count: int) -> list[list[int]]:
    return [[3 + (7 * n + 31 * place) % 500 for place in range(3 + 9 * n)] for n in range(count)]


def test_a_mixed_batch_is_what_peft_says_of_each_alone(tiny: Tiny) -> None:
    names = [BASE, *ADAPTERS, BASE, "both"]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    grade = GradeE1(tiny.reference)

    completions = tiny.llm.generate(prompts(len(names)), params, lora_ids=names)

    for name, completion in zip(names, completions, strict=True):
        grade.check(tiny.llm, completion, name=name, lora_id=name)
    assert grade.excuses == []
    assert tiny.llm.status().num_steps_with_several_adapters > 0
    different = {tuple(completion.token_ids) for completion in completions}
    assert len(different) == len(names)


def test_several_samples_and_logits_of_the_prompt_carry_the_head(tiny: Tiny) -> None:
    (prompt,) = prompts(1)
    params = SamplingParams(max_tokens=1, temperature=0, n=3, num_logprobs=0, num_prompt_logprobs=0)
    completions = tiny.llm.generate([prompt, prompt], params, lora_ids=["head", BASE])
    completion = completions[0]

    theirs = tiny.reference.logits(prompt, name="head").log_softmax(-1)
    assert completion.prompt_logprobs is not None
    ours = [entries[0] for entries in completion.prompt_logprobs[1:] if entries]
    for place, entry in enumerate(ours):
        assert entry.logprob == pytest.approx(float(theirs[place, prompt[place + 1]]), abs=1e-3)
    for name, answers in (("head", completions[:3]), (BASE, completions[3:])):
        expected = tiny.reference.greedy(prompt, name=name, num_tokens=1)
        assert [answer.token_ids for answer in answers] == [expected] * 3


def probe(llm: LLM, lora_id: str) -> ProbeResult:
    events = llm.core.handle(ProbeAdapter(call_id="p", lora_id=lora_id))
    while not events:
        events = llm.core.step()
    (done,) = events
    assert isinstance(done, CallDone)
    assert done.probe is not None
    return done.probe


def test_the_probe_finds_an_embedding_that_was_trained_for_few_tokens(
    tiny: Tiny, tmp_path: Path
) -> None:
    folder = copy_of(tiny.directories["embedding"], tmp_path / "few")
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        if name.endswith("lora_embedding_A"):
            tensor[:, np.arange(512) != 77] = 0
    save_file(tensors, folder / WEIGHTS)
    tiny.llm.load_adapter("few", folder)

    assert probe(tiny.llm, "few").has_effect
    assert probe(tiny.llm, "head").has_effect


def copy_of(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("name", ["embedding", "head"])
def test_a_base_matrix_beside_the_factors_must_be_the_base_s_own(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    folder = copy_of(tiny.directories[name], tmp_path / "trained")
    tensors = load_file(folder / WEIGHTS)
    (saved,) = (key for key in tensors if key.endswith("base_layer.weight"))
    tensors[saved][5, 7] += 0.01
    save_file(tensors, folder / WEIGHTS)

    with pytest.raises(AdapterRefused, match=r"base_layer\.weight isn't the matrix of"):
        tiny.llm.load_adapter("trained", folder)

    tensors[saved] = np.concatenate([tensors[saved], tensors[saved][:1]])
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(AdapterRefused, match="vocabulary was changed"):
        tiny.llm.load_adapter("trained", folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_matrix_may_have_been_rounded_as_a_trainer_loads_it(
    tiny: Tiny, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Also when it was widened again afterwards."""
    import safetensors.torch as safetensors

    folder = copy_of(tiny.directories["head"], tmp_path / "rounded")
    tensors = safetensors.load_file(folder / WEIGHTS)
    (saved,) = (key for key in tensors if key.endswith("base_layer.weight"))
    for number, tensor in enumerate([tensors[saved].to(dtype), tensors[saved].to(dtype).float()]):
        safetensors.save_file(tensors | {saved: tensor}, folder / WEIGHTS)
        tiny.llm.load_adapter(f"rounded-{dtype}-{number}", folder)
