"""What a sequence finds of its past, and what is said about it."""

from engine.protocol import TokenLogprob
from tests.engine.scheduler.worlds import (
    Adapters,
    make_scheduler,
    make_sequence,
    run_to_end,
    sample_all,
    step,
)


def test_a_second_request_computes_only_what_is_new():
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_sequence("a", num_prompt_tokens=10, max_tokens=1, salt="s"))
    (first,) = run_to_end(scheduler)
    scheduler.add(make_sequence("b", num_prompt_tokens=13, max_tokens=1, salt="s"))
    (second,) = run_to_end(scheduler)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert scheduler.counters.num_cached_tokens == 8
    assert scheduler.counters.num_tokens_computed == 10 + 5


def test_a_full_hit_still_computes_the_last_token():
    scheduler = make_scheduler(block_size=4)
    for name in "ab":
        scheduler.add(make_sequence(name, num_prompt_tokens=8, max_tokens=1, salt="s"))
        (output,) = run_to_end(scheduler)
    assert output.num_cached_tokens == 4
    assert len(output.token_ids) == 1


def test_an_answer_is_found_as_the_beginning_of_the_next_prompt():
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_sequence("a", num_prompt_tokens=2, max_tokens=8, salt="s"))
    run_to_end(scheduler)
    follow_up = make_sequence("b", num_prompt_tokens=2, max_tokens=1, salt="s")
    follow_up.token_ids += [1000 + i for i in range(2, 12)]
    follow_up.num_prompt_tokens = follow_up.num_tokens
    scheduler.add(follow_up)
    run_to_end(scheduler)
    assert follow_up.num_cached_tokens == 8, "the tenth token was drawn, but never computed"


def test_two_versions_and_two_salts_never_share():
    residency = Adapters("x", "y")
    residency.make_resident("x", "y")
    scheduler = make_scheduler(residency=residency)
    requests = [(None, "s"), (None, "t"), ("x", "s"), ("x", "t"), ("y", "s")]
    for _ in range(2):
        for i, (lora_id, salt) in enumerate(requests):
            scheduler.add(
                make_sequence(
                    f"r{i}", num_prompt_tokens=9, max_tokens=1, lora_id=lora_id, salt=salt
                )
            )
        cached = [output.num_cached_tokens for output in run_to_end(scheduler)]
        assert cached == [0] * 5 if scheduler.counters.num_steps == 1 else [8] * 5


def test_equal_prompts_of_one_step_are_computed_each_and_shared_later():
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_sequence(name, num_prompt_tokens=9, max_tokens=2, salt="s"))
    step(scheduler)
    assert scheduler.counters.num_tokens_computed == 18
    late = make_sequence("c", num_prompt_tokens=9, max_tokens=1, salt="s")
    scheduler.add(late)
    step(scheduler)
    assert late.num_cached_tokens == 8


def test_a_preempted_sequence_finds_its_own_blocks_again():
    # Each of the two needs four blocks in the end; there are five.
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    for name in ("old", "young"):
        scheduler.add(make_sequence(name, num_prompt_tokens=3, max_tokens=6))
    outputs = run_to_end(scheduler)
    assert scheduler.counters.num_preemptions == 1
    # Eight each in one go; of what the young one had computed, the last tokens come again.
    assert 16 < scheduler.counters.num_tokens_computed < 20
    assert {output.num_cached_tokens for output in outputs} == {0}, "its own are no cache hits"


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", num_prompt_tokens=9, max_tokens=1, salt="s"))
    run_to_end(scheduler)
    curious = make_sequence("b", num_prompt_tokens=9, max_tokens=1, salt="s", num_prompt_logprobs=1)
    scheduler.add(curious)
    plan = scheduler.plan_step()
    assert [(c.start, c.num_tokens, c.num_prompt_logits) for c in plan.chunks] == [(0, 9, 8)]


def test_a_prompt_that_is_preempted_in_its_middle_is_said_once():
    scheduler = make_scheduler(num_blocks=8, block_size=2, max_tokens_per_step=3)
    scheduler.add(make_sequence("old", num_prompt_tokens=1, max_tokens=7))
    curious = make_sequence("b", num_prompt_tokens=11, max_tokens=2, num_prompt_logprobs=0)
    scheduler.add(curious)
    said = []
    while scheduler.has_work:
        plan = scheduler.plan_step()
        logprobs = {
            i: [
                [TokenLogprob(chunk.start + row + 1, -1.0)]
                for row in range(chunk.num_prompt_logits)
            ]
            for i, chunk in enumerate(plan.chunks)
        }
        for output in scheduler.commit(plan, sample_all(plan), logprobs):
            said += [] if output.prompt_logprobs is None else [output.prompt_logprobs]
    assert scheduler.counters.num_preemptions == 1
    assert said == [[None, *([TokenLogprob(i, -1.0)] for i in range(1, 11))]]


def test_logits_of_a_prompt_end_before_its_last_token_however_it_is_chunked():
    scheduler = make_scheduler(max_tokens_per_step=4)
    scheduler.add(make_sequence("a", num_prompt_tokens=9, max_tokens=2, num_prompt_logprobs=0))
    counts = []
    while scheduler.has_work:
        plan = scheduler.plan_step()
        counts.append(sum(chunk.num_prompt_logits for chunk in plan.chunks))
        scheduler.commit(plan, sample_all(plan), {0: [[]] * counts[-1]})
    assert counts == [4, 4, 0, 0]
