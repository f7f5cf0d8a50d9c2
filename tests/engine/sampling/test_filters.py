"""Min-p, top-k and top-p against transformers' warpers, and at their edges."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampling import filters
from engine.sampling.filters import keep_min_p, keep_top_k, keep_top_p


def kept_by_us(logits, *, top_k, top_p, temperature):
    scaled = keep_top_k(logits / temperature, top_k)
    return keep_top_p(scaled.softmax(-1), top_p) > 0


def kept_by_transformers(logits, *, top_k, top_p, temperature):
    """One row at a time, since its warpers take one value for the whole batch."""
    rows = []
    for row, k, p in zip(logits, top_k, top_p, strict=True):
        scores = TemperatureLogitsWarper(temperature)(None, row[None])
        if k:
            scores = TopKLogitsWarper(k)(None, scores)
        if p < 1.0:
            scores = TopPLogitsWarper(p)(None, scores)
        rows.append(scores[0])
    scores = torch.stack(rows)
    return (scores > -torch.inf) & (scores.softmax(-1) > 0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(2, 700),
    settings_of_rows=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.999, 1.0])),
        min_size=1,
        max_size=4,
    ),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_rows_of_one_batch_keep_what_transformers_keeps(seed, vocab, settings_of_rows, temperature):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(settings_of_rows), vocab, generator=generator) * 2
    top_k, top_p = (list(values) for values in zip(*settings_of_rows, strict=True))
    ours = kept_by_us(logits, top_k=top_k, top_p=top_p, temperature=temperature)
    theirs = kept_by_transformers(logits, top_k=top_k, top_p=top_p, temperature=temperature)
    # Sums are taken from opposite ends, in fp32 there: a token that crosses p within rounding
    # may fall on either side. Anything else is a fault.
    for row in range(len(logits)):
        differing = (ours[row] != theirs[row]).nonzero().flatten()
        assert len(differing) <= 1
        if len(differing):
            probs = keep_top_k(logits / temperature, top_k).softmax(-1)[row].double()
            above = probs[probs > probs[differing]].sum()
            assert min(abs(above - top_p[row]), abs(above + probs[differing] - top_p[row])) < 1e-5


def test_the_token_that_crosses_p_is_in_the_nucleus():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 4)
    kept = keep_top_p(probs, [0.4, 0.6, 0.81, 1.0]) > 0
    assert kept.sum(-1).tolist() == [1, 2, 3, 4]


def test_the_nucleus_holds_one_token_at_least():
    probs = torch.tensor([[0.25, 0.75]])
    assert keep_top_p(probs, [1e-9]).tolist() == [[0.0, 0.75]]


def test_tokens_of_equal_probability_are_kept_together():
    probs = torch.tensor([[0.4, 0.2, 0.2, 0.2]])
    assert (keep_top_p(probs, [0.5]) > 0).all()
    assert (keep_top_k(probs, [2]) > -torch.inf).all()


def test_a_nucleus_wider_than_the_first_candidates_is_found_whole():
    vocab = 4 * filters._NUM_FIRST_CANDIDATES * filters._GROWTH
    logits = torch.linspace(1.0, 0.0, vocab).repeat(3, 1)
    probs = logits.softmax(-1)
    kept = (keep_top_p(probs, [0.9, 0.01, 0.1]) > 0).sum(-1).tolist()
    sums = probs[0].double().cumsum(-1)
    assert kept == [int((sums < p).sum()) + 1 for p in (0.9, 0.01, 0.1)]
    assert kept[0] > filters._NUM_FIRST_CANDIDATES * filters._GROWTH


@pytest.mark.parametrize("k", [0, 4, 5, 10**6])
def test_a_k_of_zero_or_of_the_vocabulary_keeps_all(k):
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert keep_top_k(logits, [k]) is logits


def test_p_of_one_keeps_all_even_where_rounded_sums_stay_below_one():
    probs = torch.full((1, 1000), 1 / 1000)
    assert keep_top_p(probs, [1.0]) is probs
    assert (keep_top_p(probs, [1.0 - 1e-12]) > 0).all()


def test_rows_without_a_filter_are_untouched_beside_rows_with_one():
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    assert keep_top_k(logits, [0, 1]).tolist() == [
        [1.0, 2.0, 3.0],
        [-torch.inf, -torch.inf, 3.0],
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(1, 300),
    min_p=st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.3, 0.9, 1.0]), min_size=1, max_size=5),
)
def test_min_p_keeps_what_transformers_keeps(seed, vocab, min_p):
    logits = torch.randn(len(min_p), vocab, generator=torch.Generator().manual_seed(seed)) * 2
    logits -= logits.max(-1, keepdim=True).values
    kept = keep_min_p(logits, min_p)
    for row, p in enumerate(min_p):
        theirs = MinPLogitsWarper(p)(None, logits[row : row + 1])[0]
        differing = ((kept[row] > -torch.inf) != (theirs > -torch.inf)).nonzero().flatten()
        assert all(abs(float(logits[row, token].exp()) - p) < 1e-6 for token in differing)
        assert kept[row].max() == 0.0


def test_min_p_of_zero_keeps_all_and_copies_nothing():
    logits = torch.tensor([[0.0, -1.0, -torch.inf]])
    assert keep_min_p(logits, [0.0]) is logits


def test_min_p_of_one_keeps_the_likeliest_and_its_equals():
    logits = torch.tensor([[0.0, -1e-3, 0.0, -9.0]])
    assert (keep_min_p(logits, [1.0]) == 0.0).tolist() == [[True, False, True, False]]
