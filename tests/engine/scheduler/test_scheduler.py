"""The rules of the scheduler, one by one."""

import pytest

from engine.errors import ContextLengthExceeded, InvalidRequest, Overloaded, UnknownAdapter
from engine.scheduler.plan import SampledToken
from engine.sequence import FinishReason, SequenceStatus
from tests.engine.scheduler.worlds import (
    EOS,
    Adapters,
    is_over,
    make_scheduler,
    make_sequence,
    run_to_end,
    sample_all,
    step,
)


def shape(plan):
    return [(c.sequence.request_id, c.start, c.num_tokens, c.samples) for c in plan.chunks]


def test_a_prompt_is_computed_in_chunks_and_samples_only_at_its_end():
    scheduler = make_scheduler(max_tokens_per_step=4)
    scheduler.add(make_sequence("a", num_prompt_tokens=10, max_tokens=2))
    shapes = []
    while scheduler.has_work:
        plan = scheduler.plan_step()
        shapes += shape(plan)
        scheduler.commit(plan, sample_all(plan))
    assert shapes == [
        ("a", 0, 4, False),
        ("a", 4, 4, False),
        ("a", 8, 2, True),
        ("a", 10, 1, True),
    ]


def test_running_sequences_come_before_waiting_ones_in_the_same_budget():
    scheduler = make_scheduler(max_tokens_per_step=4)
    scheduler.add(make_sequence("a", num_prompt_tokens=3))
    step(scheduler)
    scheduler.add(make_sequence("b", num_prompt_tokens=9))
    plan = scheduler.plan_step()
    assert shape(plan) == [("a", 3, 1, True), ("b", 0, 3, False)]
    assert plan.num_tokens == 4


def test_every_running_sequence_is_in_every_step_even_beside_a_long_prompt():
    scheduler = make_scheduler(max_tokens_per_step=5, max_model_len=100)
    for name in "abcdef":
        scheduler.add(make_sequence(name, num_prompt_tokens=17, max_tokens=20))
    while scheduler.has_work:
        plan = scheduler.plan_step()
        assert len(plan.chunks) == scheduler.num_running
        assert sum(not chunk.samples for chunk in plan.chunks) <= 1
        scheduler.commit(plan, sample_all(plan))
        scheduler.check_invariants()


def test_no_more_than_max_num_seqs_run():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_sequence(name))
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_chunks_are_ordered_by_adapter_base_first():
    residency = Adapters("x", "y")
    residency.make_resident("x", "y")
    scheduler = make_scheduler(residency=residency)
    for name, lora_id in zip("abcdef", ["y", "x", None, "y", None, "x"], strict=True):
        scheduler.add(make_sequence(name, lora_id=lora_id))
    plan = scheduler.plan_step()
    assert [chunk.sequence.request_id for chunk in plan.chunks] == ["c", "e", "b", "f", "a", "d"]
    assert [chunk.lora_index for chunk in plan.chunks] == [None, None, 0, 0, 1, 1]
    assert plan.num_adapters == 2


def test_tokens_go_to_the_chunk_at_their_position():
    residency = Adapters("x", "y")
    residency.make_resident("x", "y")
    scheduler = make_scheduler(residency=residency)
    seqs = [make_sequence(name, lora_id=lora) for name, lora in [("a", "y"), ("b", None)]]
    for seq in seqs:
        scheduler.add(seq)
    plan = scheduler.plan_step()
    outputs = scheduler.commit(plan, [SampledToken(token_id=7), SampledToken(token_id=8)])
    assert {o.request_id: o.token_ids for o in outputs} == {"b": [7], "a": [8]}
    assert [seq.token_ids[-1] for seq in seqs] == [8, 7]


class TestHowSequencesEnd:
    def end_with(self, tokens, **kwargs):
        scheduler = make_scheduler(max_model_len=kwargs.pop("max_model_len", 64))
        seq = make_sequence("a", **kwargs)
        scheduler.add(seq)
        tokens = iter(tokens)
        outputs = []
        while scheduler.has_work:
            outputs += step(scheduler, lambda _seq: next(tokens))
        assert is_over(seq)
        assert scheduler.cache.pool.num_free_blocks == scheduler.cache.pool.num_blocks
        return outputs

    def test_at_max_tokens(self):
        outputs = self.end_with([1, 2, 3, 4, 5], max_tokens=3)
        assert [o.finish_reason for o in outputs] == [None, None, "length"]

    def test_at_the_models_end_token(self):
        outputs = self.end_with([1, EOS, 3], max_tokens=3)
        assert outputs[-1].finish_reason == "stop"
        assert outputs[-1].stop_token_id == EOS
        assert outputs[-1].token_ids == [EOS]

    def test_not_at_the_models_end_token_if_it_is_ignored(self):
        outputs = self.end_with([EOS, EOS, EOS], max_tokens=3, ignore_eos=True)
        assert [o.finish_reason for o in outputs] == [None, None, "length"]
        assert outputs[-1].stop_token_id is None

    def test_at_a_stop_id_even_if_the_end_token_is_ignored(self):
        outputs = self.end_with([1, 7], max_tokens=5, stop_token_ids=(7,), ignore_eos=True)
        assert outputs[-1].stop_token_id == 7

    def test_at_an_end_token_rather_than_at_max_tokens_if_it_is_both(self):
        outputs = self.end_with([1, EOS], max_tokens=2)
        assert outputs[-1].finish_reason == "stop"

    def test_at_max_model_len(self):
        outputs = self.end_with(range(1, 9), num_prompt_tokens=4, max_tokens=50, max_model_len=7)
        assert [o.finish_reason for o in outputs] == [None, None, "length"]

    def test_alone_with_an_error_if_nothing_could_be_drawn(self):
        scheduler = make_scheduler()
        bad, good = make_sequence("bad"), make_sequence("good")
        scheduler.add(bad)
        scheduler.add(good)
        plan = scheduler.plan_step()
        outputs = scheduler.commit(plan, [SampledToken(token_id=None), SampledToken(token_id=5)])
        assert [o.finish_reason for o in outputs] == ["error", None]
        assert outputs[0].error_code == "logits_not_finite"
        assert outputs[0].token_ids == []
        assert bad.finish_reason is FinishReason.ERROR
        scheduler.check_invariants()
        assert {o.request_id for o in run_to_end(scheduler)} == {"good"}


class TestRefusals:
    def refused(self, scheduler, seq, error):
        with pytest.raises(error) as caught:
            scheduler.add(seq)
        scheduler.check_invariants()
        assert not scheduler.has_work
        return caught.value

    def test_a_sequence_that_could_never_fit_is_refused(self):
        scheduler = make_scheduler(num_blocks=3, block_size=4)
        error = self.refused(
            scheduler, make_sequence(num_prompt_tokens=4, max_tokens=10), InvalidRequest
        )
        assert "13 tokens" in str(error)
        assert "12 in all" in str(error)

    def test_a_sequence_that_fits_only_while_alone_is_served(self):
        scheduler = make_scheduler(num_blocks=3, block_size=4)
        seq = make_sequence(num_prompt_tokens=4, max_tokens=9)
        scheduler.add(seq)
        run_to_end(scheduler)
        assert seq.num_tokens == 13

    def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(self):
        scheduler = make_scheduler(max_model_len=8)
        self.refused(scheduler, make_sequence(num_prompt_tokens=8), ContextLengthExceeded)

    def test_an_empty_prompt_is_refused(self):
        self.refused(make_scheduler(), make_sequence(num_prompt_tokens=0), InvalidRequest)

    def test_no_tokens_asked_for_is_refused(self):
        self.refused(make_scheduler(), make_sequence(max_tokens=0), InvalidRequest)

    def test_an_unknown_adapter_is_refused_with_and_without_adapters(self):
        self.refused(make_scheduler(), make_sequence(lora_id="x"), UnknownAdapter)
        residency = Adapters("y")
        scheduler = make_scheduler(residency=residency)
        self.refused(scheduler, make_sequence(lora_id="x"), UnknownAdapter)
        assert residency.num_holds == 0

    def test_a_second_sequence_of_the_same_id_is_refused(self):
        scheduler = make_scheduler()
        scheduler.add(make_sequence("a"))
        with pytest.raises(InvalidRequest):
            scheduler.add(make_sequence("a"))
        assert scheduler.num_waiting == 1

    def test_a_full_queue_refuses_and_says_when_to_come_back(self):
        scheduler = make_scheduler(max_waiting_seqs=2)
        scheduler.add(make_sequence("a"))
        scheduler.add(make_sequence("b"))
        with pytest.raises(Overloaded) as caught:
            scheduler.add(make_sequence("c"))
        assert caught.value.retry_after_s > 0


class TestAbort:
    def test_an_unknown_id_is_no_error(self):
        assert make_scheduler().abort("nobody") is False

    def test_a_waiting_sequence_gives_its_claim_back(self):
        residency = Adapters("x")
        scheduler = make_scheduler(residency=residency)
        scheduler.add(make_sequence("a", lora_id="x"))
        assert residency.claims["x"] == 1
        assert scheduler.abort("a") is True
        assert residency.num_holds == 0
        assert not scheduler.has_work

    def test_a_running_sequence_gives_blocks_and_lease_back_at_once_between_steps(self):
        residency = Adapters("x")
        residency.make_resident("x")
        scheduler = make_scheduler(residency=residency)
        scheduler.add(make_sequence("a", lora_id="x"))
        step(scheduler)
        assert residency.leases["x"] == 1
        scheduler.abort("a")
        assert residency.num_holds == 0
        assert scheduler.cache.pool.num_free_blocks == 100

    def test_during_a_step_blocks_and_lease_are_held_until_its_commit(self):
        residency = Adapters("x")
        residency.make_resident("x")
        scheduler = make_scheduler(residency=residency)
        gone = make_sequence("gone", lora_id="x")
        scheduler.add(gone)
        scheduler.add(make_sequence("stays"))
        plan = scheduler.plan_step()
        sampled = sample_all(plan)
        assert scheduler.abort("gone") is True
        assert scheduler.abort("gone") is False
        scheduler.check_invariants()
        assert gone.block_table
        assert residency.leases["x"] == 1
        outputs = scheduler.commit(plan, sampled)
        assert [o.request_id for o in outputs] == ["stays"]
        assert gone.block_table == []
        assert gone.num_generated_tokens == 0
        assert residency.num_holds == 0
        scheduler.check_invariants()

    def test_a_step_that_is_lost_with_all_its_sequences_leaks_nothing(self):
        scheduler = make_scheduler()
        scheduler.add(make_sequence("a"))
        scheduler.plan_step()
        scheduler.abort("a")
        assert scheduler.has_work
        assert scheduler.plan_step() is None
        assert not scheduler.has_work
        assert scheduler.cache.pool.num_free_blocks == 100

    def test_its_id_may_come_again_during_the_same_step(self):
        scheduler = make_scheduler()
        scheduler.add(make_sequence("a"))
        plan = scheduler.plan_step()
        scheduler.abort("a")
        again = make_sequence("a", max_tokens=1)
        scheduler.add(again)
        assert scheduler.commit(plan, sample_all(plan)) == []
        assert again.status is SequenceStatus.WAITING
        assert len(run_to_end(scheduler)) == 1

    def test_a_plan_that_is_never_committed_is_made_again(self):
        scheduler = make_scheduler()
        scheduler.add(make_sequence("a"))
        scheduler.add(make_sequence("b"))
        lost = scheduler.plan_step()
        scheduler.abort("b")
        plan = scheduler.plan_step()
        scheduler.check_invariants()
        assert shape(plan) == shape(lost)[:1]
        with pytest.raises(AssertionError, match="only the last plan"):
            scheduler.commit(lost, sample_all(lost))
        scheduler.commit(plan, sample_all(plan))


def test_counters_say_what_was_computed():
    residency = Adapters("x", "y")
    residency.make_resident("x", "y")
    scheduler = make_scheduler(residency=residency)
    scheduler.add(make_sequence("a", num_prompt_tokens=5, max_tokens=1))
    step(scheduler)
    for name, lora_id in [("b", "x"), ("c", "y"), ("d", "y")]:
        scheduler.add(make_sequence(name, num_prompt_tokens=3, max_tokens=2, lora_id=lora_id))
    run_to_end(scheduler)
    counters = scheduler.counters
    assert counters.num_steps == 3
    assert counters.num_tokens_computed == 5 + 9 + 3
    assert counters.num_tokens_generated == 1 + 6
    assert counters.num_steps_with_several_adapters == 2
    assert counters.num_steps_with_several_chunks == 2
    assert counters.max_adapters_in_step == 2
