"""Masks, bias and penalties against transformers' processors, and at their edges."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine.protocol import SamplingParams
from engine.sampling.adjustments import adjust
from engine.sampling.sampler import SamplingRow, sample

NAN, INF = float("nan"), float("inf")
VOCAB = 40
ENDS = (3, 9)


def row_of(prompt, answer, *, eos=ENDS, **params):
    return SamplingRow(
        params=SamplingParams(max_tokens=99, **{"temperature": 0.0, **params}),
        seed=1,
        position=len(prompt) + len(answer),
        token_ids=[*prompt, *answer],
        num_prompt_tokens=len(prompt),
        eos_token_ids=eos,
    )


def random_logits(num_rows, *, seed=0, vocab=VOCAB):
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(logits, *rows):
    result = logits.clone()
    adjust(result, rows)
    return result


def by_transformers(logits, row):
    """Its processors, in our order; it has none for frequency and presence: the definition."""
    params, ids = row.params, torch.tensor([row.token_ids])
    processors = LogitsProcessorList()
    if params.min_tokens:
        ends = [*row.eos_token_ids, *params.stop_token_ids]
        processors.append(
            MinNewTokensLengthLogitsProcessor(row.num_prompt_tokens, params.min_tokens, ends)
        )
    if params.logit_bias:
        bias = {(token,): value for token, value in params.logit_bias.items()}
        processors.append(SequenceBiasLogitsProcessor(bias))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores = processors(ids, logits[None].clone())[0]
    for token in row.token_ids[row.num_prompt_tokens :]:
        scores[token] -= params.frequency_penalty
    for token in set(row.token_ids[row.num_prompt_tokens :]):
        scores[token] -= params.presence_penalty
    return scores


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)
WISHES = st.fixed_dictionaries(
    {},
    optional={
        "min_tokens": st.integers(0, 12),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=5
        ),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 0.25, 1.5]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 0.5, 2.0]),
    },
)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    specs=st.lists(st.tuples(TOKENS.filter(len), TOKENS, WISHES), min_size=1, max_size=5),
)
def test_rows_of_one_batch_become_what_transformers_makes_of_each(seed, specs):
    rows = [row_of(prompt, answer, **wishes) for prompt, answer, wishes in specs]
    logits = random_logits(len(rows), seed=seed)
    ours = adjusted(logits, *rows)
    theirs = torch.stack([by_transformers(logits[i], row) for i, row in enumerate(rows)])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    greedy = [token.token_id for token in sample(logits, rows)]
    assert greedy == ours.argmax(-1).tolist()


def test_repetition_counts_the_prompt_and_the_other_penalties_do_not():
    logits = torch.zeros(1, VOCAB) + 1.0
    once = adjusted(logits, row_of([7], [], repetition_penalty=2.0))
    assert once[0, 7] == 0.5
    for wish in ({"presence_penalty": 1.0}, {"frequency_penalty": 1.0}):
        assert torch.equal(adjusted(logits, row_of([7], [], **wish)), logits)


def test_frequency_counts_uses_and_presence_does_not():
    logits = torch.zeros(1, VOCAB)
    answer = [5, 5, 5, 6]
    frequency = adjusted(logits, row_of([1], answer, frequency_penalty=0.5))
    assert (frequency[0, 5], frequency[0, 6]) == (-1.5, -0.5)
    presence = adjusted(logits, row_of([1], answer, presence_penalty=0.5))
    assert (presence[0, 5], presence[0, 6]) == (-0.5, -0.5)


def test_end_and_stop_tokens_are_masked_until_the_answer_is_long_enough():
    logits = torch.zeros(1, VOCAB)
    for num_generated, masked in ((0, [3, 9, 11]), (1, [3, 9, 11]), (2, [])):
        row = row_of([1], [2] * num_generated, min_tokens=2, stop_token_ids=(11,))
        result = adjusted(logits, row)
        assert (result[0] == -INF).nonzero().flatten().tolist() == masked


def test_min_tokens_masks_ends_that_are_ignored_too():
    row = row_of([1], [], min_tokens=1, ignore_eos=True)
    assert adjusted(torch.zeros(1, VOCAB), row)[0, 3] == -INF


def test_bias_can_force_a_token_and_forbid_one():
    logits = random_logits(1)
    best = int(logits.argmax())
    other = (best + 1) % VOCAB
    assert sample(logits, [row_of([1], [], logit_bias={other: 100.0})])[0].token_id == other
    assert sample(logits, [row_of([1], [], logit_bias={best: -100.0})])[0].token_id != best


def test_bias_beats_no_mask():
    row = row_of([1], [], min_tokens=1, logit_bias={3: 100.0})
    assert adjusted(torch.zeros(1, VOCAB), row)[0, 3] == -INF


def test_tokens_beyond_the_vocabulary_are_left_out():
    row = row_of([1], [], min_tokens=1, eos=(VOCAB, 3), logit_bias={VOCAB: 5.0, -1: 5.0, 4: 1.0})
    result = adjusted(torch.zeros(1, VOCAB), row)
    assert (result[0, 3], result[0, 4]) == (-INF, 1.0)
    assert int((result == 0).sum()) == VOCAB - 2


@pytest.mark.parametrize("broken", [NAN, INF])
def test_a_mask_hides_no_value_that_is_not_finite(broken):
    logits = random_logits(1)
    logits[0, 3] = broken
    assert sample(logits, [row_of([1], [], min_tokens=1)])[0].token_id is None


def test_a_row_that_may_take_nothing_gets_no_token():
    row = row_of([1], [], min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    assert sample(random_logits(1), [row])[0].token_id is None


def test_logits_stay_as_they_are_and_logprobs_are_theirs():
    logits = random_logits(2)
    before = logits.clone()
    best = int(logits[0].argmax())
    rows = [row_of([1], [best], logit_bias={best: -100.0}, num_logprobs=1), row_of([1], [])]
    token = sample(logits, rows)[0]
    assert torch.equal(logits, before)
    assert token.token_id != best
    drawn, top = token.logprobs
    raw = before[0].log_softmax(-1)
    assert drawn.logprob == pytest.approx(float(raw[token.token_id]), abs=1e-6)
    assert top.token_id == best


def test_a_batch_that_asks_for_nothing_is_not_copied(monkeypatch):
    seen = []
    monkeypatch.setattr("engine.sampling.sampler.adjust", lambda group, rows: seen.append(rows))
    plain = row_of([1, 3], [4, 4])
    asking = row_of([1], [2], presence_penalty=1.0)
    sample(random_logits(2), [plain, plain])
    assert seen == []
    sample(random_logits(3), [plain, asking, plain])
    assert seen == [[plain, asking, plain]]


def test_a_row_that_asks_for_nothing_stays_as_it_is_beside_one_that_asks():
    logits = random_logits(3)
    logits[0, 4], logits[2, 5] = NAN, -INF
    result = adjusted(logits, row_of([1], [2]), row_of([1], [2], presence_penalty=1.0))
    assert not torch.equal(result[1], logits[1])
    assert torch.equal(result[::2].nan_to_num(7.0), logits[::2].nan_to_num(7.0))


def test_a_row_is_adjusted_only_while_it_must_be():
    assert row_of([1], [], min_tokens=1).is_adjusted
    assert not row_of([1], [2], min_tokens=1).is_adjusted
