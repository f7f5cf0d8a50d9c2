"""The whole engine on Triton's kernels gives the tokens of the plain back end.

In Triton's interpreter, in a process of its own that test_in_the_interpreter.py starts; where there
is a CUDA device, also natively, against the plain back end on the CPU.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("runs in Triton's interpreter or on CUDA", allow_module_level=True)

from engine.llm import LLM, Completion
from engine.model.cuda_graphs import CudaCapture, DecodeGraphs
from engine.model.triton_kernels import TritonKernels
from engine.protocol import SamplingParams
from punica_kernels.flashinfer_attention import AttentionShape, FlashInferAttention
from tests.end_to_end.conditions import lora_id, what_happens
from tests.end_to_end.grades import GradeE1, teacher_forced_logits
from tests.end_to_end.peft_reference import BASE, save_random_adapter, save_word_tokenizer
from tests.engine.model.fake_graphs import FakeGraph
from tests.punica_kernels.flashinfer_double import PagedPrefillDouble

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
]

ADAPTERS = {
    "all-6": {"r": 6, "lora_alpha": 12, "target_modules": "all-linear"},
    "qv-17": {"r": 17, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "head-4": {"r": 4, "lora_alpha": 8, "target_modules": ["down_proj", "lm_head"]},
}
NUM_TOKENS = 4
CHUNK = 24


class PlainReference:
    """The plain torch back end as the oracle of E1."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def logits(self, token_ids: list[int], *, name: str | None) -> torch.Tensor:
        return teacher_forced_logits(self._llm, token_ids, lora_id(name))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """Return two engines of one tiny Llama, on Triton's kernels and on plain torch."""
    root = tmp_path_factory.mktemp("tiny")
    save_two_layers(root / "base")
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        save_random_adapter(root / "base", root / name, seed=seed, **config)
    device = "cpu" if INTERPRETED else "cuda"
    ours = new_engine(root, kernels="triton", device=device)
    plain = new_engine(root, kernels="torch", device="cpu")
    with ours, plain:
        yield ours, plain


def save_two_layers(directory: Path) -> None:
    """Save the smallest Llama that has grouped query heads and more than one layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    save_word_tokenizer(directory, num_words=128)


def new_engine(root: Path, *, kernels: str, device: str) -> LLM:
    llm = LLM(
        str(root / "base"),
        state_dir=str(root / f"state-{kernels}"),
        dtype="fp32",
        kernels=kernels,
        device=device,
        memory_bytes=256 << 20,
        max_tokens_per_step=CHUNK,
        max_model_len=96,
        max_num_seqs=8,
        num_threads=1,
    )
    for adapter in ADAPTERS:
        llm.load_adapter(lora_id(adapter), root / adapter)
    return llm


def random_prompts(lengths: Sequence[int], *, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]


def test_base_and_three_adapters_chunked_and_cached_are_e1(engines: tuple[LLM, LLM]) -> None:
    """Twice the same prompts: the second time their full blocks are found."""
    ours, plain = engines
    assert ours.loaded.decoder.kernels.name == "triton"
    names = [BASE, *ADAPTERS, "all-6"]
    prompts = random_prompts((3, 40, 1, 18, 33))
    grade = GradeE1(PlainReference(plain))
    for round_ in range(2):
        with what_happens(ours) as counted:
            completions = generate(ours, prompts, names)
        assert counted["num_steps_with_several_adapters"] > 0
        assert (counted["num_cached_tokens"] > 0) == (round_ > 0)
        for completion, name in zip(completions, names, strict=True):
            grade.check_logprobs(completion, name=name)
        assert tokens(completions) == tokens(generate(plain, prompts, names))
    for completion, name in zip(completions, names, strict=True):
        grade.check(ours, completion, name=name, lora_id=lora_id(name))
    assert grade.excuses == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows of padding hold anything
def test_decode_steps_replayed_as_graphs_give_the_same_tokens(engines: tuple[LLM, LLM]) -> None:
    """In the interpreter the graph is a fake that calls again; all that is replayed is real.

    Three rows are padded to four; when one sequence ends, two rows are another graph's.
    """
    ours, plain = engines
    runner, decoder = ours.core.runner, ours.loaded.decoder
    assert isinstance(decoder.kernels, TritonKernels)
    own_graphs = runner.graphs
    graphs = runner.graphs = DecodeGraphs(
        decoder=decoder,
        kernels=decoder.kernels,
        kv=runner.kv,
        max_num_seqs=8,
        capture=FakeGraph if INTERPRETED else CudaCapture(ours.loaded.device),
    )
    names = [BASE, "all-6", "head-4"]
    prompts = random_prompts((3, 5, 9))
    params = [greedy(5), greedy(8), greedy(8)]
    replayed = generate(ours, prompts, names, params)
    runner.graphs = own_graphs
    assert graphs.num_replays > graphs.num_graphs > 1
    assert tokens(replayed) == tokens(generate(plain, prompts, names, params))


def test_flashinfers_attention_in_its_place_gives_the_same_tokens(engines: tuple[LLM, LLM]) -> None:
    """By a double that computes what FlashInfer's documentation says, in every step but those of
    single tokens: prompts in one chunk, in several, behind cached blocks, and beside decodes. All
    that an earlier owner left in the blocks is NaN, and nothing of it comes through.
    """
    ours, plain = engines
    kernels, kv = ours.loaded.decoder.kernels, ours.core.runner.kv
    assert isinstance(kernels, TritonKernels)
    shape = AttentionShape(
        num_heads=kernels.spec.num_heads,
        num_kv_heads=kernels.spec.num_kv_heads,
        head_dim=kernels.spec.head_dim,
        block_size=kv.block_size,
        dtype=kv.k.dtype,
    )
    doubles: list[PagedPrefillDouble] = []

    def make_double(*args: object, **more: object) -> PagedPrefillDouble:
        doubles.append(PagedPrefillDouble(*args, **more))
        return doubles[-1]

    kv.k.fill_(torch.nan)
    kv.v.fill_(torch.nan)
    kernels.flashinfer = FlashInferAttention(make_double, shape=shape, device=kv.k.device)
    names = [BASE, *ADAPTERS, "all-6"]
    prompts = random_prompts((4, 41, 2, 19, 34), seed=5)  # nothing that is cached already
    grade = GradeE1(PlainReference(plain))
    for round_ in range(2):
        with what_happens(ours) as counted:
            completions = generate(ours, prompts, names)
        assert (counted["num_cached_tokens"] > 0) == (round_ > 0)
        for completion, name in zip(completions, names, strict=True):
            grade.check_logprobs(completion, name=name)
        assert tokens(completions) == tokens(generate(plain, prompts, names))
    kernels.flashinfer = None
    (double,) = doubles
    assert double.num_runs == kernels.spec.num_layers * len(double.planned)
    assert all(max(rows) > 1 for rows in double.planned)
    assert any(len(rows) > 1 and min(rows) == 1 for rows in double.planned)
    assert grade.excuses == []


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, num_logprobs=1)


def generate(
    llm: LLM,
    prompts: list[list[int]],
    names: list[str | None],
    params: list[SamplingParams] | None = None,
) -> list[Completion]:
    params = params or [greedy(NUM_TOKENS)] * len(prompts)
    return llm.generate(prompts, params, lora_ids=[lora_id(name) for name in names])


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]
