"""What is drawn: the right distribution, and the same token whatever is beside it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import SamplingParams
from engine.sampling.sampler import SamplingRow, sample

NAN, INF = float("nan"), float("inf")


def row(*, seed=0, position=0, sample_index=0, token_ids=(), **params):
    return SamplingRow(
        params=SamplingParams(max_tokens=1, **params),
        seed=seed,
        position=position,
        sample_index=sample_index,
        token_ids=token_ids,
    )


def random_logits(num_rows, vocab, *, seed=0, spread=2.0):
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def expected_probs(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The definition, a token at a time."""
    probs = (logits.double() / temperature).softmax(-1)
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    order = [token for token in order if probs[token] >= min_p * probs[order[0]]][: top_k or None]
    total = sum(float(probs[token]) for token in order)
    kept, so_far = [], 0.0
    for token in order:
        if so_far >= top_p:
            break
        kept.append(token)
        so_far += float(probs[token]) / total
    result = torch.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 8, "top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.05, "top_k": 12, "top_p": 0.8, "temperature": 1.3},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    num_draws, vocab = 20_000, 25
    logits = random_logits(1, vocab, seed=3)
    rows = [row(seed=11, position=position, **params) for position in range(num_draws)]
    drawn = [token.token_id for token in sample(logits.expand(num_draws, vocab), rows)]
    counts = torch.bincount(torch.tensor(drawn), minlength=vocab).double()
    probs = expected_probs(logits[0], **params)
    assert counts[probs == 0].sum() == 0
    # Tokens so rare that their counts aren't nearly normal share one bucket.
    is_common = probs * num_draws >= 5
    expected = torch.cat([probs[is_common], probs[~is_common].sum()[None]]) * num_draws
    observed = torch.cat([counts[is_common], counts[~is_common].sum()[None]])
    assert abs(observed[-1] - expected[-1]) <= 4 * expected[-1] ** 0.5 + 1
    chi_square = float(((observed - expected)[:-1] ** 2 / expected[:-1]).sum())
    freedom = len(expected) - 1
    assert chi_square < freedom + 3.3 * (2 * freedom) ** 0.5


def test_temperature_zero_takes_the_most_likely_token():
    logits = random_logits(4, 300)
    rows = [row(temperature=0.0, seed=seed, top_k=3, top_p=0.5) for seed in range(4)]
    assert [t.token_id for t in sample(logits, rows)] == logits.argmax(-1).tolist()


def test_the_smallest_temperature_that_is_not_greedy_gives_no_nan():
    logits = random_logits(1, 300, spread=100.0)
    assert sample(logits, [row(temperature=1e-5)])[0].token_id == int(logits.argmax())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(1, 600),
    specs=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.7, 1.0, 1.5]),
            st.sampled_from([0, 1, 5, 40]),
            st.sampled_from([0.1, 0.9, 1.0]),
            st.sampled_from([None, 0, 3]),
            st.integers(0, 2**63),
            st.integers(0, 4096),
            st.sampled_from(["fine"] * 4 + ["broken"]),
            st.sampled_from([{}, {}, {"min_p": 0.1}, {"repetition_penalty": 1.5}, {"n": 2}]),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_a_rows_result_depends_on_no_other_row(seed, vocab, specs):
    logits = random_logits(len(specs), vocab, seed=seed)
    rows = []
    for i, (temperature, top_k, top_p, num_logprobs, row_seed, position, state, more) in enumerate(
        specs
    ):
        rows.append(
            row(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                num_logprobs=num_logprobs,
                seed=row_seed,
                position=position,
                sample_index=i,
                token_ids=[token % vocab for token in range(i)],
                **more,
            )
        )
        if state == "broken":
            logits[i, position % vocab] = NAN
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
    backwards = sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


def test_a_rows_result_depends_on_no_other_row_where_the_library_uses_threads():
    vocab = 50_257
    logits = random_logits(8, vocab, spread=4.0)
    rows = [
        row(seed=i, position=i, temperature=1.0 + i / 9, num_logprobs=5, **filters)
        for i, filters in enumerate([{}, {"top_k": 100}, {"top_p": 0.9}, {"top_p": 0.999}] * 2)
    ]
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
    assert sample(logits, rows) == alone


def test_the_same_seed_and_position_draw_the_same_token_and_others_draw_others():
    logits = torch.zeros(1, 1000)
    first = sample(logits, [row(seed=5, position=9)])
    assert sample(logits, [row(seed=5, position=9)]) == first
    others = {sample(logits, [row(seed=5, position=p)])[0].token_id for p in range(10, 30)}
    assert len(others) > 15


def test_samples_of_one_request_differ_and_repeat():
    logits = random_logits(1, 1000, spread=0.5).expand(16, 1000)
    rows = [row(seed=5, position=9, sample_index=n) for n in range(16)]
    first = sample(logits, rows)
    assert sample(logits, rows) == first
    assert len({token.token_id for token in first}) > 12


def test_a_nucleus_is_one_of_what_min_p_leaves():
    """The other order would keep three of these: 0.4 + 0.3 is short of 0.75."""
    logits = torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1]]).log().expand(300, 5)
    rows = [row(position=n, min_p=0.5, top_p=0.75) for n in range(300)]
    assert {token.token_id for token in sample(logits, rows)} == {0, 1}
    rows = [row(position=n, min_p=0.5, top_p=0.55) for n in range(300)]
    assert {token.token_id for token in sample(logits, rows)} == {0}


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_row_that_is_not_finite_gets_no_token_and_harms_no_other(value):
    logits = random_logits(4, 50)
    logits[1, 17] = value
    logits[2] = -INF
    rows = [row(temperature=t, num_logprobs=2) for t in (1.0, 1.0, 0.0, 0.0)]
    tokens = sample(logits, rows)
    assert [token.token_id is None for token in tokens] == [False, True, True, False]
    assert [token.logprobs is None for token in tokens] == [False, True, True, False]


def test_a_token_of_minus_infinity_is_never_drawn():
    logits = torch.full((500, 4), -INF)
    logits[:, 2] = 1.0
    rows = [row(position=position) for position in range(500)]
    assert {token.token_id for token in sample(logits, rows)} == {2}


class TestLogprobs:
    def test_are_of_the_raw_logits_the_drawn_token_first(self):
        logits = random_logits(1, 40)
        token = sample(logits, [row(temperature=1.7, top_k=3, num_logprobs=2, seed=1)])[0]
        raw = logits[0].log_softmax(-1)
        best = raw.topk(2)
        first, *top = token.logprobs
        assert first.token_id == token.token_id
        assert first.logprob == pytest.approx(float(raw[token.token_id]), abs=1e-6)
        assert [entry.token_id for entry in top] == best.indices.tolist()
        assert [entry.logprob for entry in top] == pytest.approx(best.values.tolist(), abs=1e-6)

    def test_are_as_many_as_each_row_asks_for(self):
        rows = [row(num_logprobs=n) for n in (None, 0, 5, 1)]
        tokens = sample(random_logits(4, 40), rows)
        assert [None if t.logprobs is None else len(t.logprobs) for t in tokens] == [None, 1, 6, 2]

    def test_are_no_more_than_the_vocabulary(self):
        token = sample(random_logits(1, 3), [row(num_logprobs=20)])[0]
        assert len(token.logprobs) == 4


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, 10), []) == []
