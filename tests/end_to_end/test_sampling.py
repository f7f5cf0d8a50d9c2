"""Sampling parameters through the whole engine, against transformers' generate, in one batch."""

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.llm import LLM
from engine.protocol import SamplingParams
from tests.end_to_end.peft_reference import save_tiny_llama

NUM_TOKENS = 24
END = 2


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sampling")
    save_tiny_llama(directory)
    return directory


@pytest.fixture(scope="module")
def llm(base_dir):
    with LLM(
        str(base_dir),
        dtype="fp32",
        num_threads=1,
        kernels="torch",
        memory_bytes=16 * 2**20,
        max_num_seqs=6,
        max_tokens_per_step=16,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs(base_dir):
    return LlamaForCausalLM.from_pretrained(base_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 512, (n,), generator=generator).tolist() for n in (5, 40, 21)]


def by_transformers(model, prompt, **processors) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        **processors,
    )
    return ids[0, len(prompt) :].tolist()


WISHES = [
    ({}, {}),
    ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    ({"logit_bias": {7: 9.0, 300: 8.0}}, {"sequence_bias": [[[7], 9.0], [[300], 8.0]]}),
    (
        {"logit_bias": {END: 60.0}, "min_tokens": 9},
        {"sequence_bias": [[[END], 60.0]], "min_new_tokens": 9},
    ),
]


def test_greedy_answers_of_one_batch_are_those_of_transformers(llm, theirs, prompts):
    asked = [(prompt, ours, other) for prompt in prompts for ours, other in WISHES]
    params = [SamplingParams(max_tokens=NUM_TOKENS, temperature=0, **ours) for _, ours, _ in asked]
    completions = llm.generate([prompt for prompt, _, _ in asked], params)
    assert llm.status().num_steps_with_several_chunks > 0
    for (prompt, ours, other), completion in zip(asked, completions, strict=True):
        assert completion.token_ids == by_transformers(theirs, prompt, **other), ours
    ended = [completion for completion in completions if completion.finish_reason == "stop"]
    assert {len(completion.token_ids) for completion in ended} == {10}


def test_frequency_and_presence_count_the_answer_alone(llm, theirs, prompts):
    """The definition, a token at a time, with no cache that could be wrong."""
    prompt, answer = prompts[1], []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = theirs(torch.tensor([prompt + answer]), use_cache=False).logits[0, -1]
            for token in answer:
                logits[token] -= 1.25
            for token in set(answer):
                logits[token] -= 0.5
            answer.append(int(logits.argmax()))
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0, frequency_penalty=1.25, presence_penalty=0.5
    )
    (completion,) = llm.generate([prompt], params)
    assert completion.token_ids == answer[: len(completion.token_ids)]


def test_samples_repeat_whatever_runs_beside_them(llm, prompts):
    """More samples than fit at once, beside others, of prompts that take several steps."""
    params = SamplingParams(
        max_tokens=12, temperature=1.0, seed=5, n=9, top_p=0.9, min_p=0.01, presence_penalty=0.5
    )
    other = SamplingParams(max_tokens=20, seed=1, n=2)
    alone = llm.generate([prompts[1]], params)
    beside = llm.generate([prompts[0], prompts[1], prompts[2]], [other, params, other])[2:11]
    texts = [completion.token_ids for completion in alone]
    assert [completion.token_ids for completion in beside] == texts
    assert [completion.sample_index for completion in beside] == list(range(9))
    assert len({tuple(token_ids) for token_ids in texts}) == 9


def test_logprobs_are_the_same_whatever_is_asked_of_the_sampler(llm, prompts):
    """Of the model's own logits: a forced token has the logprob that it would have had."""
    plain, forced = llm.generate(
        [prompts[0]] * 2,
        [
            SamplingParams(max_tokens=1, temperature=0, num_logprobs=20),
            SamplingParams(max_tokens=1, temperature=0.7, num_logprobs=20, logit_bias={9: 100.0}),
        ],
    )
    assert forced.token_ids == [9]
    assert [entry.token_id for entry in forced.logprobs[0][1:]] == [
        entry.token_id for entry in plain.logprobs[0][1:]
    ]
    assert forced.logprobs[0][0].logprob < plain.logprobs[0][0].logprob
