"""Who may use which version, when it is loaded, and when it must go."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.errors import AdapterConflict, AdapterRefused, UnknownAdapter
from engine.lora.arena_allocator import ArenaAllocator, Move
from engine.lora.residency import AdapterResidency, PendingLoad, RowSpan


class TickingClock:
    """Each reading is a second later than the last."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


def residency_of(num_rows: int = 16, mlp_rows: int = 16) -> AdapterResidency:
    allocator = {"attention": ArenaAllocator(num_rows), "mlp": ArenaAllocator(mlp_rows)}
    return AdapterResidency(allocator=allocator, clock=TickingClock())


def add(residency: AdapterResidency, lora_id: str, rows: int | Mapping[str, int] = 4) -> None:
    num_rows = {"attention": rows} if isinstance(rows, int) else rows
    residency.add(
        lora_id,
        content_digest=f"sha256:{lora_id}",
        image=Path(f"{lora_id}.arena"),
        num_rows=num_rows,
        max_rank=4,
    )


def load(residency: AdapterResidency, lora_id: str) -> PendingLoad:
    """Claim, load, unclaim."""
    residency.claim(lora_id)
    pending = residency.next_load()
    assert pending is not None
    assert pending.lora_id == lora_id
    residency.loaded(lora_id)
    residency.unclaim(lora_id)
    residency.check_invariants()
    return pending


def states(residency: AdapterResidency) -> dict[str, str]:
    return {status.lora_id: status.state for status in residency.statuses()}


def test_nothing_is_loaded_before_somebody_claims_it() -> None:
    residency = residency_of()
    add(residency, "a")
    assert residency.next_load() is None
    assert residency.lease("a") is None
    residency.claim("a")
    pending = residency.next_load()
    assert pending is not None
    assert pending.spans == {"attention": RowSpan(row0=0, num_rows=4)}
    assert pending.image == Path("a.arena")
    assert states(residency) == {"a": "loading"}
    assert residency.next_load() is None
    assert residency.lease("a") is None
    residency.loaded("a")
    lease = residency.lease("a")
    assert lease is not None
    assert lease.lora_index == pending.lora_index
    residency.check_invariants()


def test_a_name_means_the_content_it_was_last_added_with() -> None:
    residency = residency_of()
    for digest in ("sha256:old", "sha256:new"):
        residency.add(
            "a", content_digest=digest, image=Path("a.arena"), num_rows={"mlp": 1}, max_rank=1
        )
        assert residency.content_digest("a") == digest
        residency.unload("a")
        with pytest.raises(UnknownAdapter):
            residency.content_digest("a")


def test_a_claim_taken_back_before_the_load_starts_cancels_it() -> None:
    residency = residency_of()
    add(residency, "a")
    residency.claim("a")
    residency.claim("a")
    residency.unclaim("a")
    residency.unclaim("a")
    assert residency.next_load() is None


def test_the_oldest_claim_is_loaded_first() -> None:
    residency = residency_of()
    for lora_id in "abc":
        add(residency, lora_id)
    for lora_id in "bac":
        residency.claim(lora_id)
    order = [pending.lora_id for _ in range(3) if (pending := residency.next_load()) is not None]
    assert order == ["b", "a", "c"]


def test_a_claim_that_cannot_be_had_does_not_hold_up_the_next() -> None:
    residency = residency_of(num_rows=8)
    add(residency, "running", 4)
    load(residency, "running")
    assert residency.lease("running") is not None
    add(residency, "wide", 8)
    add(residency, "small", 4)
    residency.claim("wide")
    residency.claim("small")
    pending = residency.next_load()
    assert pending is not None
    assert pending.lora_id == "small"


def test_the_least_recently_released_is_evicted() -> None:
    residency = residency_of(num_rows=12)
    for lora_id in "abc":
        add(residency, lora_id)
        load(residency, lora_id)
    first, second = residency.lease("a"), residency.lease("b")
    assert first is not None
    assert second is not None
    residency.release(second)
    residency.release(first)
    add(residency, "d")
    pending = load(residency, "d")
    assert states(residency) == {"a": "resident", "b": "resident", "c": "absent", "d": "resident"}
    assert len(pending.evicted) == 1
    add(residency, "e")
    load(residency, "e")
    assert states(residency)["b"] == "absent"
    assert residency.num_evictions == 2
    assert residency.num_loads == 5


def test_leased_and_claimed_versions_are_never_evicted() -> None:
    residency = residency_of(num_rows=8)
    for lora_id in "ab":
        add(residency, lora_id)
        load(residency, lora_id)
    lease = residency.lease("a")
    assert lease is not None
    residency.claim("b")
    add(residency, "c")
    residency.claim("c")
    assert residency.next_load() is None
    residency.release(lease)
    pending = residency.next_load()
    assert pending is not None
    assert pending.evicted == (lease.lora_index,)


def test_nothing_is_evicted_in_vain() -> None:
    """Neither when it isn't enough, nor when it has no rows where they are short."""
    residency = residency_of(num_rows=8, mlp_rows=8)
    add(residency, "mlp only", {"mlp": 4})
    add(residency, "idle", 4)
    add(residency, "busy", 4)
    for lora_id in ("mlp only", "idle", "busy"):
        load(residency, lora_id)
    lease = residency.lease("busy")
    assert lease is not None
    add(residency, "wide", 8)
    residency.claim("wide")
    assert residency.next_load() is None
    assert states(residency)["idle"] == "resident"
    residency.release(lease)
    assert residency.next_load() is not None
    assert states(residency)["mlp only"] == "resident"
    assert states(residency)["idle"] == states(residency)["busy"] == "absent"


def test_scattered_free_rows_are_brought_together() -> None:
    residency = residency_of(num_rows=12)
    for lora_id in "abc":
        add(residency, lora_id)
        load(residency, lora_id)
    held = [residency.lease("b"), residency.lease("c")]
    residency.unload("a")
    assert [gone.lora_id for gone in residency.take_gone()] == ["a"]
    add(residency, "d", 2)
    load(residency, "d")
    residency.lease("d")
    # d has rows 0 and 1, b 4 to 7, c 8 to 11: two free rows between d and b.
    residency.release(held[0])
    add(residency, "wide", 6)
    residency.claim("wide")
    pending = residency.next_load()
    assert pending is not None
    assert pending.moves == ()
    assert pending.spans["attention"] == RowSpan(row0=2, num_rows=6)
    residency.check_invariants()


def test_leased_versions_move_when_room_is_made() -> None:
    residency = residency_of(num_rows=12)
    for lora_id in "abc":
        add(residency, lora_id)
        load(residency, lora_id)
    assert residency.lease("b") is not None
    residency.unload("a")
    residency.unload("c")
    add(residency, "wide", 8)
    residency.claim("wide")
    pending = residency.next_load()
    assert pending is not None
    assert [(step.group, step.move) for step in pending.moves] == [
        ("attention", Move(src_row0=4, dst_row0=0, num_rows=4))
    ]
    assert pending.spans["attention"] == RowSpan(row0=4, num_rows=8)
    residency.check_invariants()


def test_rows_that_are_being_written_do_not_move() -> None:
    residency = residency_of(num_rows=12)
    add(residency, "first")
    load(residency, "first")
    add(residency, "loading")
    residency.claim("loading")
    assert residency.next_load() is not None
    residency.unload("first")
    add(residency, "wide", 8)
    residency.claim("wide")
    assert residency.next_load() is None
    residency.loaded("loading")
    pending = residency.next_load()
    assert pending is not None
    assert len(pending.moves) == 1


def test_a_version_wider_than_an_empty_arena_is_refused_with_both_numbers() -> None:
    residency = residency_of(num_rows=16, mlp_rows=8)
    with pytest.raises(AdapterRefused) as refused:
        add(residency, "wide", {"attention": 17, "mlp": 9, "head": 1})
    assert len(refused.value.problems) == 3
    assert "17" in refused.value.problems[0]
    assert "16" in refused.value.problems[0]
    assert not residency.knows("wide")
    add(residency, "just", {"attention": 16, "mlp": 8})


def test_a_double_release_is_an_error() -> None:
    residency = residency_of()
    add(residency, "a")
    load(residency, "a")
    lease, other = residency.lease("a"), residency.lease("a")
    assert lease is not None
    assert other is not None
    residency.release(lease)
    with pytest.raises(AssertionError, match="released twice"):
        residency.release(lease)


def test_an_unload_waits_for_leases_and_takes_no_new_ones() -> None:
    residency = residency_of()
    add(residency, "a")
    load(residency, "a")
    lease = residency.lease("a")
    assert lease is not None
    residency.unload("a")
    residency.unload("a")
    assert not residency.knows("a")
    assert not residency.finish_unload("a")
    assert residency.lease("a") is None
    with pytest.raises(AdapterConflict, match="being unloaded"):
        residency.claim("a")
    with pytest.raises(AdapterConflict, match="being unloaded"):
        add(residency, "a")
    residency.check_invariants()
    residency.release(lease)
    assert residency.finish_unload("a")
    assert residency.num_free_rows == residency.num_rows
    (gone,) = residency.take_gone()
    assert (gone.image, gone.failure) == (Path("a.arena"), None)
    with pytest.raises(UnknownAdapter):
        residency.claim("a")
    add(residency, "a")


def test_an_unload_during_a_load_is_over_when_the_rows_are_no_longer_written() -> None:
    residency = residency_of()
    add(residency, "a")
    residency.claim("a")
    assert residency.next_load() is not None
    residency.unload("a")
    residency.unclaim("a")
    assert not residency.finish_unload("a")
    residency.check_invariants()
    residency.loaded("a")
    assert residency.finish_unload("a")
    assert residency.num_loads == 0
    residency.check_invariants()


def test_a_failed_load_is_not_tried_again() -> None:
    residency = residency_of()
    add(residency, "a")
    residency.claim("a")
    assert residency.next_load() is not None
    residency.load_failed("a", "the image is cut short")
    assert not residency.knows("a")
    assert residency.next_load() is None
    assert residency.take_gone() == []
    residency.check_invariants()
    residency.unclaim("a")
    (gone,) = residency.take_gone()
    assert gone.failure == "the image is cut short"
    assert residency.num_free_rows == residency.num_rows
    residency.check_invariants()


def test_a_version_without_rows_needs_no_room() -> None:
    residency = residency_of(num_rows=0, mlp_rows=0)
    add(residency, "a", {"attention": 0})
    load(residency, "a")
    assert residency.lease("a") is not None


def test_a_known_version_cannot_be_added_again() -> None:
    residency = residency_of()
    add(residency, "a")
    with pytest.raises(AdapterConflict, match="already loaded"):
        add(residency, "a")


def test_unknown_versions_are_never_taken_for_something_else() -> None:
    residency = residency_of()
    assert not residency.knows("a")
    for action in (residency.claim, residency.lease, residency.unload, residency.unclaim):
        with pytest.raises(UnknownAdapter):
            action("a")
