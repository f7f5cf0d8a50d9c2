"""Conditions under which an answer must stay the same, and whether they came true."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from engine.llm import LLM
from engine.protocol import SamplingParams
from engine.sequence import Sequence

NUM_TOKENS = 24
COUNTED = (
    "num_steps",
    "num_steps_with_several_adapters",
    "num_steps_with_several_chunks",
    "num_preemptions",
    "num_cached_tokens",
    "num_tokens_computed",
)


def lora_id(name: str | None) -> str | None:
    """Return what a test's engine knows the adapter `name` by; None is the base."""
    return None if name is None else f"{name}@000000000000"


def greedy(*, num_tokens: int = NUM_TOKENS, **more: object) -> SamplingParams:
    """Return what makes `num_tokens` of the most likely tokens."""
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, **more)


@contextmanager
def scarce_blocks(llm: LLM, num_blocks: int | None) -> Iterator[None]:
    """Leave `num_blocks` of KV to all others, or all: one more sequence holds the rest."""
    cache = llm.core.scheduler.cache
    ballast = Sequence(
        request_id="ballast",
        token_ids=[],
        num_prompt_tokens=0,
        params=SamplingParams(max_tokens=1),
        seed=0,
        eos_token_ids=(),
    )
    num_held = 0 if num_blocks is None else cache.pool.num_free_blocks - num_blocks
    assert cache.extend(ballast, num_held * cache.block_size)
    yield
    cache.release(ballast)


@contextmanager
def what_happens(llm: LLM) -> Iterator[Counter[str]]:
    """Fill a counter, at the end, with what the core has counted meanwhile; nothing may leak."""
    before, counted = llm.status(), Counter()
    yield counted
    after = llm.status()
    assert after.num_free_blocks == after.num_blocks
    for field in COUNTED:
        counted[field] = getattr(after, field) - getattr(before, field)
    llm.core.check_invariants()


def agreement_of(one: list[int], other: list[int]) -> float:
    """Return the share of places in which two answers are the same."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)
