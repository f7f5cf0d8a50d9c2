"""Any mix of adapters in a batch, chunked any way, gives the tokens that PEFT gives alone."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.llm import LLM, Completion
from engine.protocol import SamplingParams
from tests.end_to_end.conditions import (
    NUM_TOKENS,
    agreement_of,
    greedy,
    lora_id,
    scarce_blocks,
    what_happens,
)
from tests.end_to_end.default_base import (  # noqa: F401 - collected here
    state_dir,
    test_default_base_in_bf16_is_e2_with_adapters_in_bf16,
    test_default_base_in_fp32_is_e1_under_six_conditions,
)
from tests.end_to_end.grades import MAX_LOGIT_GAP, GradeE1
from tests.end_to_end.peft_reference import (
    BASE,
    PeftReference,
    save_random_adapter,
    save_tiny_llama,
)

pytestmark = pytest.mark.slow

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
MIXES = {
    "base only": [BASE] * 6,
    "one adapter": ["all-16"] * 6,
    "all and base": [BASE, *TINY_ADAPTERS],
    "random mix a": random.Random(1).choices([BASE, *TINY_ADAPTERS], k=16),
    "random mix b": random.Random(2).choices([BASE, *TINY_ADAPTERS], k=16),
    "random mix c": random.Random(3).choices([BASE, *TINY_ADAPTERS], k=16),
}


class Tiny:
    """A tiny Llama with eight adapters, served in chunks of several sizes, and PEFT's view of it.

    One engine for each size, so that what a test leaves behind is the next one's to cope with.
    """

    def __init__(self, root: Path) -> None:
        self.base_dir = root / "base"
        save_tiny_llama(self.base_dir)
        self.directories = {name: root / name for name in TINY_ADAPTERS}
        for seed, (name, config) in enumerate(TINY_ADAPTERS.items()):
            save_random_adapter(self.base_dir, root / name, seed=seed, **config)
        base = LlamaForCausalLM.from_pretrained(self.base_dir, dtype=torch.float32)
        self.reference = PeftReference(base, self.directories)
        self.grade = GradeE1(self.reference)
        self._root = root
        self._engines: dict[int, LLM] = {}
        self._salts = itertools.count()

    def engine(self, chunk: int) -> LLM:
        """Return the engine whose steps compute at most `chunk` tokens; it has all adapters."""
        if chunk not in self._engines:
            llm = LLM(
                str(self.base_dir),
                state_dir=str(self._root / f"state-{chunk}"),
                dtype="fp32",
                max_tokens_per_step=chunk,
                max_model_len=160,
                max_num_seqs=10,
                num_threads=1,
            )
            self._engines[chunk] = llm
            for name, directory in self.directories.items():
                llm.load_adapter(lora_id(name), directory)
        return self._engines[chunk]

    def new_salt(self) -> str:
        """Return a salt under which nothing is cached."""
        return f"salt {next(self._salts)}"

    def close(self) -> None:
        for llm in self._engines.values():
            llm.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    world = Tiny(tmp_path_factory.mktemp("tiny"))
    yield world
    world.close()


def prompts_for(names: list[str | None], *, vocab_size: int) -> list[list[int]]:
    """Prompts of very different lengths; equal for equal positions."""
    lengths = itertools.cycle([3, 33, 70, 1, 128, 17])
    generator = random.Random(7)
    return [
        [generator.randrange(3, vocab_size) for _ in range(length)]
        for _name, length in zip(names, lengths, strict=False)
    ]


# Blocks that are left: all, or enough for the longest sequence alone, but not for those that
# begin beside it.
ROOMY, PREEMPTING = None, 12
MEMORIES = pytest.mark.parametrize("memory", [ROOMY, PREEMPTING], ids=["roomy", "preempting"])
# A step of one token runs one sequence, which nobody can preempt.
CONDITIONS = [
    pytest.param(chunk, memory, id=f"{chunk}-{'roomy' if memory is ROOMY else 'preempting'}")
    for chunk, memory in itertools.product([1, 7, 64, 512], [ROOMY, PREEMPTING])
    if chunk > 1 or memory is ROOMY
]


@pytest.mark.parametrize(("chunk", "memory"), CONDITIONS)
@pytest.mark.parametrize("mix", MIXES)
def test_any_mix_chunked_any_way_cold_and_warm_is_what_peft_says(tiny, mix, chunk, memory):
    llm, names, salt = tiny.engine(chunk), MIXES[mix], tiny.new_salt()
    prompts = prompts_for(names, vocab_size=512)

    def answer(order: list[int]) -> list[Completion]:
        return llm.generate(
            [prompts[i] for i in order],
            greedy(num_logprobs=0),
            lora_ids=[lora_id(names[i]) for i in order],
            cache_salt=salt,
        )

    # The second time the last come first: under pressure, theirs is what can still be found.
    order = list(range(len(names)))
    runs = []
    with what_happens(llm) as cold, scarce_blocks(llm, memory):
        runs += zip(order, answer(order), strict=True)
    with what_happens(llm) as warm, scarce_blocks(llm, memory):
        runs += zip(order[::-1], answer(order[::-1]), strict=True)

    for i, completion in runs:
        tiny.grade.check(llm, completion, name=names[i], lora_id=lora_id(names[i]))
        tiny.grade.check_logprobs(completion, name=names[i])
    assert tiny.grade.excuses == []
    assert cold["num_cached_tokens"] == 0
    assert warm["num_cached_tokens"] > 0
    for counted in (cold, warm):
        assert (counted["num_preemptions"] > 0) == (memory is PREEMPTING)
        if chunk > 1:
            assert counted["num_steps_with_several_chunks"] > 0
            assert (counted["num_steps_with_several_adapters"] > 0) == (len(set(names)) > 2)
    if chunk < 128:
        assert cold["num_steps"] > sum(len(prompt) for prompt in prompts) // chunk


@MEMORIES
def test_samples_of_one_prompt_are_each_what_peft_says(tiny, memory):
    """Greedy, so that all of a request's are the same, over shared blocks and copied ones."""
    llm, names = tiny.engine(64), [BASE, *TINY_ADAPTERS]
    prompts = prompts_for(names, vocab_size=512)
    with what_happens(llm) as counted, scarce_blocks(llm, memory):
        completions = llm.generate(
            prompts,
            greedy(n=3, num_logprobs=0),
            lora_ids=[lora_id(name) for name in names],
            cache_salt=tiny.new_salt(),
        )
    assert [completion.sample_index for completion in completions] == [0, 1, 2] * len(names)
    for i, completion in enumerate(completions):
        name = names[i // 3]
        tiny.grade.check(llm, completion, name=name, lora_id=lora_id(name))
        tiny.grade.check_logprobs(completion, name=name)
    assert tiny.grade.excuses == []
    num_prompt_tokens = sum(map(len, prompts))
    num_answer_tokens = len(completions) * (NUM_TOKENS - 1)
    if memory is ROOMY:
        assert counted["num_tokens_computed"] < 1.1 * (num_prompt_tokens + num_answer_tokens)
    else:
        assert counted["num_preemptions"] > 0


def test_seeded_samples_differ_and_are_the_same_under_any_pressure(tiny):
    llm, names = tiny.engine(64), [BASE, *TINY_ADAPTERS]
    prompts = prompts_for(names, vocab_size=512)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, n=3, seed=11)

    def answer(salt: str) -> list[list[int]]:
        loras = [lora_id(name) for name in names]
        found = llm.generate(prompts, params, lora_ids=loras, cache_salt=salt)
        return [completion.token_ids for completion in found]

    salt = tiny.new_salt()
    cold = answer(salt)
    for i in range(len(names)):
        samples = cold[3 * i : 3 * i + 3]
        assert len(set(map(tuple, samples))) == 3
    with what_happens(llm) as warm:
        assert answer(salt) == cold
    assert warm["num_cached_tokens"] > 0
    with what_happens(llm) as preempting, scarce_blocks(llm, PREEMPTING):
        assert answer(tiny.new_salt()) == cold
    assert preempting["num_preemptions"] > 0


@pytest.mark.parametrize("chunk", [7, 512])
def test_prompt_logprobs_are_what_peft_says_however_warm_the_cache(tiny, chunk):
    llm, names, salt = tiny.engine(chunk), [BASE, *TINY_ADAPTERS], tiny.new_salt()
    prompts = prompts_for(names, vocab_size=512)
    loras = [lora_id(name) for name in names]
    llm.generate(prompts, greedy(), lora_ids=loras, cache_salt=salt)
    with what_happens(llm) as counted, scarce_blocks(llm, PREEMPTING):
        completions = llm.generate(
            prompts, greedy(num_prompt_logprobs=2, n=2), lora_ids=loras, cache_salt=salt
        )
    assert counted["num_cached_tokens"] == 0
    assert counted["num_preemptions"] > 0
    for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        first, second = completions[2 * i : 2 * i + 2]
        assert second.prompt_logprobs is None
        theirs = tiny.grade.logits(prompt, name=name).log_softmax(-1)
        assert first.prompt_logprobs is not None
        assert first.prompt_logprobs[0] is None
        assert len(first.prompt_logprobs) == len(prompt)
        for position, entries in enumerate(first.prompt_logprobs[1:]):
            best = theirs[position].topk(2)
            expected = [(prompt[position + 1], float(theirs[position, prompt[position + 1]]))]
            expected += zip(best.indices.tolist(), best.values.tolist(), strict=True)
            assert [entry.token_id for entry in entries] == [token for token, _ in expected]
            for entry, (_, logprob) in zip(entries, expected, strict=True):
                assert entry.logprob == pytest.approx(logprob, abs=2 * MAX_LOGIT_GAP)


def test_a_corrupted_block_is_felt_by_whoever_finds_it_and_by_nobody_else(tiny):
    """The hits of the other tests are real: what they find is read."""
    llm, salt = tiny.engine(64), tiny.new_salt()
    prompt = prompts_for([BASE] * 6, vocab_size=512)[4]
    kv = llm.core.runner.kv
    (before,) = llm.generate([prompt], greedy(), cache_salt=salt)
    (warm,) = llm.generate([prompt], greedy(), cache_salt=salt)
    assert warm.num_cached_tokens == 112
    assert warm.token_ids == before.token_ids
    kept = kv.k.clone(), kv.v.clone()
    kv.k.add_(1.0)
    kv.v.neg_()
    (spoilt,) = llm.generate([prompt], greedy(), cache_salt=salt)
    (other,) = llm.generate([prompt], greedy(), cache_salt=tiny.new_salt())
    kv.k.copy_(kept[0])
    kv.v.copy_(kept[1])
    assert spoilt.token_ids != before.token_ids
    assert other.token_ids == before.token_ids
    (healed,) = llm.generate([prompt], greedy(), cache_salt=salt)
    assert healed.token_ids == before.token_ids


def test_new_weights_under_an_old_name_find_nothing_of_the_old_ones(tiny):
    llm, salt, name = tiny.engine(64), tiny.new_salt(), lora_id("moving")
    prompt = prompts_for([BASE] * 6, vocab_size=512)[4]

    def answer(adapter: str) -> int:
        """Load the adapter under the name that moves, and return how much was found for it."""
        llm.load_adapter(name, tiny.directories[adapter])
        (completion,) = llm.generate([prompt], greedy(), lora_ids=[name], cache_salt=salt)
        tiny.grade.check(llm, completion, name=adapter, lora_id=name)
        llm.unload_adapter(name)
        return completion.num_cached_tokens

    assert [answer("all-16"), answer("qv-4"), answer("mlp-12")] == [0, 0, 0]
    assert answer("all-16") == 112, "the same content is the same version, whatever came between"
    assert tiny.grade.excuses == []


def test_adapters_of_the_tiny_model_disagree_with_each_other(tiny):
    """Were two adapters alike, mixing them up would pass unseen."""
    prompts = prompts_for([BASE] * 6, vocab_size=512)

    tokens = {
        name: [
            token
            for prompt in prompts
            for token in tiny.reference.greedy(prompt, name=name, num_tokens=NUM_TOKENS)
        ]
        for name in [BASE, *tiny.directories]
    }

    for one, other in itertools.combinations(tokens, 2):
        agreement = agreement_of(tokens[one], tokens[other])
        assert agreement <= 0.9, f"{one} and {other} agree on {agreement:.0%} of tokens"
