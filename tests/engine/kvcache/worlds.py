"""Sequences for a cache, computed by nobody but their word."""

from engine.protocol import SamplingParams
from engine.sequence import Sequence


def make_sequence(token_ids, *, root=b"root", name="s", **params):
    token_ids = list(token_ids)
    return Sequence(
        request_id=name,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(max_tokens=1, **params),
        seed=0,
        eos_token_ids=(),
        cache_root=root,
    )


def compute(cache, seq, *, up_to=None):
    """Say that all tokens of `seq`, or the first `up_to`, have been computed."""
    seq.num_computed_tokens = seq.num_tokens if up_to is None else up_to
    cache.mark_computed(seq)
