"""Who waits for whom: shares, priorities, and what a flood does to everybody else."""

from collections import deque
from statistics import mean

import pytest

from engine.scheduler.fair_queue import QueuePolicy
from engine.scheduler.shares import ShareCounters
from tests.engine.scheduler.worlds import Adapters, make_scheduler, make_sequence, step

FLOOD = 20
NUM_REQUESTS = 10
PERIOD_STEPS = 24


class Clock:
    """One second a step: the only thing that takes time is computing."""

    def __init__(self):
        self.now_s = 0

    def __call__(self):
        return self.now_s


def waits_of_calm_tenant(*, flood, policy=QueuePolicy.FAIR, lora_ids=(None, None)):
    """Return seconds from arrival to end of each of the calm tenant's requests.

    It sends one request every PERIOD_STEPS, which is less than half of what the engine can do;
    the other tenant sends `flood` of the same kind each time.
    """
    clock = Clock()
    residency = Adapters("x", "y", clock=clock)
    residency.make_resident("x", "y")
    scheduler = make_scheduler(
        max_num_seqs=2,
        max_tokens_per_step=16,
        residency=residency,
        policy=policy,
        max_waiting_seqs=10_000,
    )
    arrived_s, waits = {}, []

    def add(tenant, name, lora_id):
        kind = {"num_prompt_tokens": 8, "max_tokens": 10}
        scheduler.add(make_sequence(name, tenant=tenant, lora_id=lora_id, **kind))
        arrived_s[name] = clock.now_s

    while len(waits) < NUM_REQUESTS:
        if clock.now_s % PERIOD_STEPS == 0:
            turn = clock.now_s // PERIOD_STEPS
            for i in range(flood):
                add("loud", f"loud-{turn}-{i}", lora_ids[1])
            if turn < NUM_REQUESTS:
                add("calm", f"calm-{turn}", lora_ids[0])
        clock.now_s += 1
        ended = [output.request_id for output in step(scheduler) if output.finish_reason]
        waits += [clock.now_s - arrived_s[name] for name in ended if name.startswith("calm")]
    return waits


@pytest.mark.parametrize("lora_ids", [(None, None), ("x", "y"), ("x", "x"), (None, "x")])
def test_a_flood_leaves_another_tenant_its_share(lora_ids):
    """Its fair share of two places is one, in which a request takes ten steps when it is alone."""
    alone = waits_of_calm_tenant(flood=0, lora_ids=lora_ids)
    flooded = waits_of_calm_tenant(flood=FLOOD, lora_ids=lora_ids)
    assert set(alone) == {10}
    assert max(flooded) <= 2 * max(alone)


def test_without_fairness_the_same_flood_is_felt():
    """The flood is real: first come, first served lets the wait grow with the queue."""
    flooded = waits_of_calm_tenant(flood=FLOOD, policy=QueuePolicy.FCFS)
    assert mean(flooded) > 30 * 10


def run_in_order(scheduler, seqs):
    """Return the names in the order of their ends; one runs at a time."""
    for seq in seqs:
        scheduler.add(seq)
    names = []
    while scheduler.has_work:
        names += [output.request_id for output in step(scheduler) if output.finish_reason]
    return names


def one_at_a_time(policy=QueuePolicy.FAIR):
    return make_scheduler(max_num_seqs=1, policy=policy)


def test_tenants_take_turns():
    seqs = [make_sequence(name, tenant=name[0]) for name in ("a1", "a2", "a3", "b1", "b2", "b3")]
    assert run_in_order(one_at_a_time(), seqs) == ["a1", "b1", "a2", "b2", "a3", "b3"]


def test_adapters_of_one_tenant_take_turns():
    residency = Adapters("x", "y")
    residency.make_resident("x", "y")
    scheduler = make_scheduler(max_num_seqs=1, residency=residency)
    seqs = [make_sequence(name, lora_id=name[0]) for name in ("x1", "x2", "y1", "y2")]
    assert run_in_order(scheduler, seqs) == ["x1", "y1", "x2", "y2"]


def test_within_a_share_the_first_comes_first():
    seqs = [make_sequence(name, num_prompt_tokens=9 - i) for i, name in enumerate("abcd")]
    assert run_in_order(one_at_a_time(), seqs) == ["a", "b", "c", "d"]


def test_who_had_more_tokens_waits_longer():
    seqs = [
        make_sequence("a-large", tenant="a", num_prompt_tokens=40),
        make_sequence("a2", tenant="a"),
        *(make_sequence(f"b{i}", tenant="b") for i in range(3)),
    ]
    # 40 + 4·2 against 4 + 4·2 a request.
    assert run_in_order(one_at_a_time(), seqs) == ["a-large", "b0", "b1", "b2", "a2"]


def test_a_lower_priority_comes_first_whatever_its_share_had():
    seqs = [
        make_sequence("a-urgent", tenant="a", priority=-1),
        make_sequence("a-too", tenant="a", priority=-1),
        make_sequence("b", tenant="b"),
        make_sequence("c-last", tenant="c", priority=1),
    ]
    assert run_in_order(one_at_a_time(), seqs[::-1]) == ["a-too", "a-urgent", "b", "c-last"]


def test_first_come_first_served_looks_at_nothing_else():
    seqs = [
        make_sequence("a1", tenant="a", priority=1),
        make_sequence("a2", tenant="a"),
        make_sequence("b1", tenant="b", priority=-1),
    ]
    assert run_in_order(one_at_a_time(QueuePolicy.FCFS), seqs) == ["a1", "a2", "b1"]


def test_a_newcomer_has_no_credit_from_the_time_it_was_away():
    scheduler = one_at_a_time()
    waiting = deque(make_sequence(f"a{i}", tenant="a") for i in range(50))
    for _ in range(40):
        scheduler.add(waiting.popleft())
    names = []
    while len(names) < 20:
        names += [output.request_id for output in step(scheduler) if output.finish_reason]
    late = [make_sequence(f"b{i}", tenant="b") for i in range(10)]
    order = run_in_order(scheduler, late)
    assert [name[0] for name in order[:10]] in (list("ababababab"), list("bababababa"))


def test_cached_tokens_cost_nothing():
    a = {"tenant": "a", "num_prompt_tokens": 41, "max_tokens": 1}
    b = {"tenant": "b", "num_prompt_tokens": 60, "max_tokens": 1}
    seqs = [
        make_sequence("a1", salt="a", **a),
        make_sequence("b1", **b),
        *(make_sequence(f"a{i}", salt="a", **a) for i in (2, 3, 4)),
        make_sequence("b2", **b),
    ]
    assert run_in_order(one_at_a_time(), seqs) == ["a1", "b1", "a2", "a3", "a4", "b2"]


def test_samples_are_charged_like_requests_and_their_account_is_closed_once():
    scheduler = one_at_a_time()
    seqs = [
        make_sequence("a1", tenant="a", n=4),
        make_sequence("a2", tenant="a"),
        *(make_sequence(f"b{i}", tenant="b") for i in range(3)),
    ]
    order = list(dict.fromkeys(run_in_order(scheduler, seqs)))
    assert order == ["a1", "b0", "b1", "b2", "a2"]


class TestShareCounters:
    def test_a_share_that_comes_back_keeps_what_it_has_had_above_the_others(self):
        counters = ShareCounters()
        counters.join(("a", None))
        counters.join(("b", None))
        counters.charge(("a", None), 10)
        counters.leave(("a", None))
        counters.join(("a", None))
        assert counters["a", None] == 10

    def test_nothing_is_remembered_once_nobody_is_there(self):
        counters = ShareCounters()
        counters.join(("a", None))
        counters.charge(("a", None), 10)
        counters.leave(("a", None))
        counters.check_invariants()
        counters.join(("a", None))
        assert counters["a", None] == 0

    def test_idle_shares_that_a_lift_would_replace_are_forgotten(self):
        counters = ShareCounters()
        counters.join(("stays", None))
        for i in range(1000):
            counters.join((f"t{i}", None))
            counters.charge((f"t{i}", None), 1)
            counters.leave((f"t{i}", None))
            counters.charge(("stays", None), 1)
        assert counters.num_shares < 100
        counters.check_invariants()
