"""One request, several samples: one prompt, one lease, one end."""

import pytest

from engine.errors import InvalidRequest
from engine.scheduler.plan import SampledToken
from engine.sequence import SequenceStatus
from tests.engine.scheduler.worlds import (
    EOS,
    Adapters,
    make_scheduler,
    make_sequence,
    run_to_end,
    sample_all,
    step,
)


def tokens_of(outputs, request_id="a"):
    """Return the tokens of each sample of a request, by index."""
    found = {}
    for output in outputs:
        if output.request_id == request_id:
            found.setdefault(output.sample_index, []).extend(output.token_ids)
    return found


def table_of(scheduler, sample_index):
    plan = scheduler.plan_step()
    (chunk,) = [c for c in plan.chunks if c.sequence.sample_index == sample_index]
    return list(chunk.sequence.block_table), plan


def test_the_prompt_is_computed_once_and_all_samples_draw_from_its_last_logits():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", num_prompt_tokens=6, max_tokens=3, n=3))
    plan = scheduler.plan_step()
    assert [(c.num_tokens, c.drawn_samples) for c in plan.chunks] == [(6, range(3))]
    outputs = scheduler.commit(plan, [SampledToken(token_id=t) for t in (10, 20, 30)])
    assert tokens_of(outputs) == {0: [10], 1: [20], 2: [30]}
    plan = scheduler.plan_step()
    assert [(c.start, c.num_tokens, c.drawn_samples) for c in plan.chunks] == [
        (6, 1, range(i, i + 1)) for i in range(3)
    ]
    outputs = scheduler.commit(plan, sample_all(plan))
    run_to_end(scheduler)
    assert scheduler.counters.num_tokens_computed == 6 + 3 * 2
    assert scheduler.cache.pool.num_free_blocks == 100


def test_full_blocks_are_shared_and_the_partial_one_is_copied_for_each_further_sample():
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_sequence("a", num_prompt_tokens=10, n=3))
    step(scheduler)
    plan = scheduler.plan_step()
    first, *others = [chunk.sequence.block_table for chunk in plan.chunks]
    for table in others:
        assert table[:2] == first[:2]
        assert table[2] != first[2]
    assert [(copy.source, copy.target) for copy in plan.block_copies] == [
        (first[2], table[2]) for table in others
    ]
    scheduler.commit(plan, sample_all(plan))
    assert scheduler.plan_step().block_copies == ()


def test_copies_of_a_step_that_is_lost_are_made_again():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", num_prompt_tokens=6, n=2))
    step(scheduler)
    lost = scheduler.plan_step()
    assert scheduler.plan_step().block_copies == lost.block_copies != ()


def test_each_sample_ends_by_itself_and_the_request_with_the_last():
    residency = Adapters("x")
    residency.make_resident("x")
    scheduler = make_scheduler(residency=residency)
    scheduler.add(make_sequence("a", max_tokens=3, n=3, lora_id="x"))
    plan = scheduler.plan_step()
    outputs = scheduler.commit(plan, [SampledToken(token_id=t) for t in (EOS, 1, 1)])
    assert [o.finish_reason for o in outputs] == ["stop", None, None]
    scheduler.check_invariants()
    assert residency.leases["x"] == 1
    plan = scheduler.plan_step()
    outputs = scheduler.commit(plan, [SampledToken(token_id=t) for t in (1, EOS)])
    assert [(o.sample_index, o.finish_reason) for o in outputs] == [(1, None), (2, "stop")]
    assert residency.leases["x"] == 1
    assert scheduler.has_work
    outputs = step(scheduler)
    assert [(o.sample_index, o.finish_reason) for o in outputs] == [(1, "length")]
    assert residency.num_holds == 0
    assert not scheduler.has_work


def test_all_samples_may_end_with_their_first_token():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", max_tokens=1, n=4))
    outputs = step(scheduler)
    assert [(o.sample_index, o.finish_reason) for o in outputs] == [(i, "length") for i in range(4)]
    assert not scheduler.has_work
    assert scheduler.cache.pool.num_free_blocks == 100


def test_samples_without_a_place_wait_before_all_others():
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.add(make_sequence("a", num_prompt_tokens=6, max_tokens=2, n=4))
    outputs = step(scheduler)
    scheduler.add(make_sequence("late", max_tokens=2))
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 3)
    outputs += run_to_end(scheduler)
    ends = [(o.request_id, o.sample_index) for o in outputs if o.finish_reason]
    assert sorted(ends) == [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("late", 0)]
    assert ends.index(("a", 3)) < ends.index(("late", 0))


def test_samples_without_blocks_find_the_shared_ones_again():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add(make_sequence("a", num_prompt_tokens=10, max_tokens=4, n=3))
    outputs = run_to_end(scheduler)
    assert {index: len(tokens) for index, tokens in tokens_of(outputs).items()} == {
        0: 4,
        1: 4,
        2: 4,
    }
    # Sample 0 computes the prompt; each other one at most its last two tokens again.
    assert scheduler.counters.num_tokens_computed <= 10 + 3 * 3 + 2 * 2
    assert scheduler.counters.num_cached_tokens == 0


def test_a_sample_is_preempted_alone_and_comes_back_with_its_own_tokens():
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    scheduler.add(make_sequence("a", num_prompt_tokens=3, max_tokens=6, n=2))
    outputs = []
    while scheduler.counters.num_preemptions == 0:
        outputs += step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    outputs += run_to_end(scheduler)
    assert tokens_of(outputs) == {i: [100 * i + t for t in range(1003, 1009)] for i in range(2)}


@pytest.mark.parametrize("sample_index", [0, 1, 2])
def test_the_answer_of_each_sample_is_found_by_whoever_goes_on_from_it(sample_index):
    scheduler = make_scheduler(block_size=2)
    scheduler.add(make_sequence("a", num_prompt_tokens=5, max_tokens=8, n=3, salt="s"))
    tokens = tokens_of(run_to_end(scheduler))[sample_index]
    follow_up = make_sequence("b", num_prompt_tokens=5, max_tokens=1, salt="s")
    follow_up.token_ids += tokens
    follow_up.num_prompt_tokens = follow_up.num_tokens
    scheduler.add(follow_up)
    run_to_end(scheduler)
    assert follow_up.num_cached_tokens == 12


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_abort_ends_all_samples_wherever_they_are(max_num_seqs):
    residency = Adapters("x")
    residency.make_resident("x")
    scheduler = make_scheduler(residency=residency, max_num_seqs=max_num_seqs)
    scheduler.add(make_sequence("a", n=4, lora_id="x"))
    step(scheduler)
    assert scheduler.num_running == min(max_num_seqs, 4)
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    scheduler.check_invariants()
    assert not scheduler.has_work
    assert residency.num_holds == 0
    assert scheduler.cache.pool.num_free_blocks == 100


def test_aborted_during_a_step_the_samples_keep_blocks_and_lease_until_its_commit():
    residency = Adapters("x")
    residency.make_resident("x")
    scheduler = make_scheduler(residency=residency, max_num_seqs=2)
    scheduler.add(make_sequence("a", n=3, lora_id="x"))
    step(scheduler)
    plan = scheduler.plan_step()
    sampled = sample_all(plan)
    scheduler.abort("a")
    scheduler.check_invariants()
    assert residency.leases["x"] == 1
    assert scheduler.commit(plan, sampled) == []
    assert residency.num_holds == 0
    scheduler.check_invariants()


def test_abort_of_the_prompts_step_forks_nothing():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", n=3))
    plan = scheduler.plan_step()
    scheduler.abort("a")
    assert scheduler.commit(plan, sample_all(plan)) == []
    assert not scheduler.has_work
    assert scheduler.cache.pool.num_free_blocks == 100


def test_an_unload_names_a_request_once_however_many_samples_it_has():
    residency = Adapters("x")
    residency.make_resident("x")
    scheduler = make_scheduler(residency=residency, max_num_seqs=2)
    scheduler.add(make_sequence("a", n=3, lora_id="x"))
    step(scheduler)
    assert scheduler.fail_waiting("x") == []
    assert scheduler.abort_running("x") == ["a"]
    assert residency.num_holds == 0


def test_samples_run_before_what_is_in_the_middle_of_its_prompt():
    scheduler = make_scheduler(max_tokens_per_step=8)
    scheduler.add(make_sequence("a", num_prompt_tokens=4, n=3))
    scheduler.add(make_sequence("long", num_prompt_tokens=30))
    step(scheduler)
    plan = scheduler.plan_step()
    assert [(c.sequence.request_id, c.num_tokens) for c in plan.chunks] == [
        ("a", 1),
        ("a", 1),
        ("a", 1),
        ("long", 5),
    ]
    assert scheduler.num_running == 4


def test_a_prompt_that_is_computed_in_chunks_draws_only_at_its_end():
    scheduler = make_scheduler(max_tokens_per_step=4)
    scheduler.add(make_sequence("a", num_prompt_tokens=6, n=2))
    plan = scheduler.plan_step()
    assert plan.chunks[0].drawn_samples == range(0)
    scheduler.commit(plan, [])
    assert scheduler.plan_step().chunks[0].drawn_samples == range(2)


def test_no_samples_asked_for_is_refused():
    with pytest.raises(InvalidRequest):
        make_scheduler().add(make_sequence(n=0))


def test_if_nothing_can_be_drawn_every_sample_ends_with_the_error():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", num_prompt_tokens=9, n=2, salt="s"))
    plan = scheduler.plan_step()
    outputs = scheduler.commit(plan, [SampledToken(token_id=None)] * 2)
    assert [(o.sample_index, o.finish_reason) for o in outputs] == [(0, "error"), (1, "error")]
    assert not scheduler.has_work
    again = make_sequence("again", num_prompt_tokens=9, salt="s")
    scheduler.add(again)
    step(scheduler)
    assert again.num_cached_tokens == 0, "blocks in doubt aren't found"
    assert again.status is SequenceStatus.RUNNING
