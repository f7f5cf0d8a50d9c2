"""What happens when there is no block left."""

from engine.sequence import SequenceStatus
from tests.engine.scheduler.worlds import (
    Adapters,
    is_over,
    make_scheduler,
    make_sequence,
    run_to_end,
    step,
)


def two_that_fit_only_one_at_a_time():
    # Each of the two needs four blocks in the end; there are five.
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    old = make_sequence("old", num_prompt_tokens=3, max_tokens=6)
    young = make_sequence("young", num_prompt_tokens=3, max_tokens=6)
    scheduler.add(old)
    scheduler.add(young)
    return scheduler, old, young


def test_the_youngest_gives_its_blocks_and_both_finish():
    scheduler, old, young = two_that_fit_only_one_at_a_time()
    outputs = []
    while scheduler.counters.num_preemptions == 0:
        outputs += step(scheduler)
    assert old.status is SequenceStatus.RUNNING
    assert young.status is SequenceStatus.WAITING
    assert young.num_computed_tokens == 0
    assert young.block_table == []
    outputs += run_to_end(scheduler)
    for seq in (old, young):
        tokens = [t for o in outputs if o.request_id == seq.request_id for t in o.token_ids]
        assert tokens == [1003, 1004, 1005, 1006, 1007, 1008]
        assert seq.token_ids == [0, 1, 2, *tokens]


def test_a_preempted_sequence_waits_before_all_others():
    scheduler, _, young = two_that_fit_only_one_at_a_time()
    late = make_sequence("late", num_prompt_tokens=1, max_tokens=1)
    scheduler.add(late)
    while not is_over(young):
        step(scheduler)
        if young.status is SequenceStatus.WAITING:
            assert late.status is SequenceStatus.WAITING
    assert scheduler.counters.num_preemptions > 0


def test_a_preempted_sequence_keeps_its_lease():
    residency = Adapters("x")
    residency.make_resident("x")
    scheduler = make_scheduler(num_blocks=5, block_size=2, residency=residency)
    for name in ("old", "young"):
        scheduler.add(make_sequence(name, num_prompt_tokens=3, max_tokens=6, lora_id="x"))
    while scheduler.counters.num_preemptions == 0:
        step(scheduler)
    assert (residency.leases["x"], residency.claims["x"]) == (2, 0)
    assert scheduler.fail_waiting("x") == []
    residency.unload("x")  # no new claim and no new lease from here on
    run_to_end(scheduler)
    assert residency.num_holds == 0


def test_a_preempted_sequence_is_ended_with_the_running_ones_of_its_adapter():
    residency = Adapters("x")
    residency.make_resident("x")
    scheduler = make_scheduler(num_blocks=5, block_size=2, residency=residency)
    for name in ("old", "young"):
        scheduler.add(make_sequence(name, num_prompt_tokens=3, max_tokens=6, lora_id="x"))
    while scheduler.counters.num_preemptions == 0:
        step(scheduler)
    assert set(scheduler.abort_running("x")) == {"old", "young"}
    scheduler.check_invariants()
    assert residency.num_holds == 0


def test_the_watermark_keeps_a_start_from_preempting_at_once():
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    scheduler.add(make_sequence("a", num_prompt_tokens=4, max_tokens=3))
    step(scheduler)
    scheduler.add(make_sequence("b", num_prompt_tokens=4, max_tokens=3))
    step(scheduler)
    assert scheduler.num_running == 1
    run_to_end(scheduler)
    assert scheduler.counters.num_preemptions == 0
