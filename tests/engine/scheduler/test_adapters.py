"""Claims, leases, and who may start before whom."""

import pytest

from engine.scheduler.fair_queue import QueuePolicy
from tests.engine.scheduler.worlds import (
    Adapters,
    is_over,
    make_scheduler,
    make_sequence,
    run_to_end,
    step,
)


def test_a_sequence_claims_while_it_waits_and_leases_while_it_runs():
    residency = Adapters("x")
    scheduler = make_scheduler(residency=residency)
    scheduler.add(make_sequence("a", lora_id="x"))
    assert scheduler.plan_step() is None
    assert scheduler.has_work
    assert (residency.claims["x"], residency.leases["x"]) == (1, 0)
    assert scheduler.waiting_lora_ids == ["x"]
    residency.load_next()
    step(scheduler)
    assert (residency.claims["x"], residency.leases["x"]) == (0, 1)
    assert scheduler.running_lora_ids == ["x"]
    run_to_end(scheduler)
    assert residency.num_holds == 0


def test_a_sequence_whose_adapter_is_absent_is_passed_over():
    residency = Adapters("x")
    scheduler = make_scheduler(residency=residency)
    scheduler.add(make_sequence("absent", lora_id="x"))
    scheduler.add(make_sequence("base"))
    assert [o.request_id for o in step(scheduler)] == ["base"]


def test_arrival_order_holds_again_once_the_adapter_is_resident():
    residency = Adapters("x")
    scheduler = make_scheduler(residency=residency, max_num_seqs=1)
    for name, lora_id in [("absent", "x"), ("b", None), ("c", None)]:
        scheduler.add(make_sequence(name, lora_id=lora_id, max_tokens=1))
    assert [o.request_id for o in step(scheduler)] == ["b"]
    residency.load_next()
    assert [o.request_id for o in step(scheduler)] == ["absent"]


def test_without_blocks_the_lease_is_given_back_and_all_behind_wait():
    residency = Adapters("x")
    residency.make_resident("x")
    scheduler = make_scheduler(num_blocks=6, block_size=4, residency=residency)
    scheduler.add(make_sequence("big", num_prompt_tokens=12, max_tokens=4))
    step(scheduler)
    scheduler.add(make_sequence("next", num_prompt_tokens=12, lora_id="x"))
    scheduler.add(make_sequence("small", num_prompt_tokens=1, max_tokens=1))
    step(scheduler)
    assert scheduler.num_waiting == 2
    assert (residency.claims["x"], residency.leases["x"]) == (1, 0)


@pytest.mark.parametrize("policy", QueuePolicy)
def test_a_cold_adapter_behind_a_hot_one_gets_its_turn(policy):
    residency = Adapters("hot", "cold", max_resident=1)
    scheduler = make_scheduler(residency=residency, max_num_seqs=2, max_overtakes=5, policy=policy)
    for i in range(3):
        scheduler.add(make_sequence(f"hot{i}", lora_id="hot"))
    residency.load_next()
    step(scheduler)
    cold = make_sequence("cold", lora_id="cold")
    scheduler.add(cold)
    num_overtakes = 0  # by those that came later
    for i in range(3, 100):  # the hot adapter's requests never end
        scheduler.add(make_sequence(f"hot{i}", lora_id="hot"))
        residency.load_next()
        num_overtakes += sum(
            int(o.request_id[3:]) >= 3
            for o in step(scheduler)
            if o.finish_reason and o.request_id != "cold"
        )
        if is_over(cold):
            break
    assert is_over(cold)
    # In a fair order the cold one comes before hot2 too, though that arrived earlier.
    assert num_overtakes == (5 if policy is QueuePolicy.FCFS else 4)
    run_to_end(scheduler, residency=residency)
    assert residency.num_holds == 0


def test_the_base_goes_on_behind_a_closed_queue():
    residency = Adapters("hot", "cold")
    residency.make_resident("hot")
    scheduler = make_scheduler(residency=residency, max_overtakes=1)
    scheduler.add(make_sequence("cold", lora_id="cold"))
    for i in range(3):
        scheduler.add(make_sequence(f"hot{i}", lora_id="hot"))
    scheduler.add(make_sequence("base"))
    assert {o.request_id for o in step(scheduler)} == {"hot0", "base"}
    assert residency.claims == {"cold": 1, "hot": 0}
    residency.load_next()
    step(scheduler)
    assert scheduler.num_running == 5


def test_unload_ends_the_waiting_ones_first_and_the_running_ones_when_asked():
    residency = Adapters("x", "y")
    residency.make_resident("x", "y")
    scheduler = make_scheduler(residency=residency, max_num_seqs=2)
    for name, lora_id in [("a", "x"), ("b", "y"), ("c", "x"), ("d", "y")]:
        scheduler.add(make_sequence(name, lora_id=lora_id))
    step(scheduler)
    assert scheduler.fail_waiting("x") == ["c"]
    assert scheduler.abort_running("x") == ["a"]
    scheduler.check_invariants()
    assert (residency.claims["x"], residency.leases["x"]) == (0, 0)
    assert {o.request_id for o in run_to_end(scheduler)} == {"b", "d"}
