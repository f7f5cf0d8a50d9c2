from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adapters.errors import AdapterConflict, AdapterNameInvalid, AdapterNotFound
from adapters.record import (
    AdapterRecord,
    VersionState,
    activate,
    drop_alias,
    fail,
    promote,
    prune,
    publish,
    resolve,
    retire,
    revive,
    rollback,
)


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def add(record: AdapterRecord | None, number: int, **changes: Any) -> AdapterRecord:
    fields = {"name": "json", "base_id": "tiny", "digest": digest(number), "created": "t"}
    return publish(record, **(fields | changes))


def three() -> AdapterRecord:
    return add(add(add(None, 1), 2), 3)


def test_the_first_active_version_becomes_the_default() -> None:
    record = add(None, 1)
    assert record.aliases == {"default": digest(1)}
    assert (record.versions[0].label, record.generation) == ("v1", 1)


def test_later_versions_leave_the_default_where_it_is() -> None:
    assert three().aliases == {"default": digest(1)}
    assert add(three(), 4, promote=True).aliases == {"default": digest(4)}


def test_the_same_content_is_the_same_version() -> None:
    assert add(three(), 2) is not None
    record = three()
    assert add(record, 2) is record


def test_publishing_again_with_promote_moves_the_default() -> None:
    record = add(three(), 2, promote=True)
    assert record.aliases == {"default": digest(2)}
    assert [entry.number for entry in record.versions] == [1, 2, 3]


def test_a_name_belongs_to_one_base() -> None:
    with pytest.raises(AdapterConflict, match="tiny"):
        add(three(), 4, base_id="other")


def test_a_bad_name_is_refused() -> None:
    with pytest.raises(AdapterNameInvalid):
        add(None, 1, name="a/b")


@pytest.mark.parametrize(
    ("ref", "number"),
    [(None, 1), ("default", 1), ("prod", 2), ("v3", 3), (digest(3), 3)],
)
def test_a_version_is_found_by_number_alias_or_digest(ref: str | None, number: int) -> None:
    record = promote(three(), alias="prod", version_ref="v2")
    assert resolve(record, ref).number == number


@pytest.mark.parametrize("ref", ["v4", "v0", "canary", digest(9), "", "sha256:000000000000"])
def test_an_unknown_or_unclear_reference_is_not_found(ref: str) -> None:
    with pytest.raises(AdapterNotFound, match="json"):
        resolve(three(), ref)


def test_the_short_digest_of_a_lora_id_is_enough() -> None:
    record = add(None, 1, digest="sha256:" + "a" * 64)
    assert resolve(record, "sha256:" + "a" * 12).number == 1


def test_rollback_swaps_with_the_previous_target() -> None:
    record = promote(three(), alias="default", version_ref="v3")
    once = rollback(record)
    assert once.aliases == {"default": digest(1)}
    twice = rollback(once)
    assert twice.aliases == {"default": digest(3)}
    assert twice.generation == record.generation + 2


def test_an_alias_that_never_moved_cannot_be_rolled_back() -> None:
    with pytest.raises(AdapterConflict, match="nothing to go back to"):
        rollback(three())
    with pytest.raises(AdapterNotFound, match="no alias"):
        rollback(three(), "prod")


def test_promoting_where_it_points_already_changes_nothing() -> None:
    record = three()
    assert promote(record, alias="default", version_ref="v1") is record


def test_an_alias_can_be_promoted_to_where_another_points() -> None:
    record = promote(three(), alias="canary", version_ref="v3")
    assert promote(record, alias="default", version_ref="canary").aliases["default"] == digest(3)


def test_a_version_number_cannot_be_an_alias() -> None:
    with pytest.raises(AdapterNameInvalid):
        promote(three(), alias="v9", version_ref="v1")


def test_a_probing_version_is_not_routable_until_it_is_active() -> None:
    record = add(None, 1, state=VersionState.PROBING)
    assert record.aliases == {}
    with pytest.raises(AdapterConflict, match="is probing"):
        promote(record, alias="prod", version_ref="v1")
    assert activate(record, digest(1)).aliases == {"default": digest(1)}


def test_a_version_that_asked_for_default_gets_it_when_it_becomes_active() -> None:
    record = add(three(), 4, state=VersionState.PROBING, promote=True)
    assert record.aliases == {"default": digest(1)}
    active = activate(record, digest(4))
    assert active.aliases == {"default": digest(4)}
    assert rollback(active).aliases == {"default": digest(1)}
    failed = fail(record, digest(4), reason="no effect")
    again = add(failed, 4, state=VersionState.PROBING)
    assert activate(again, digest(4)).aliases == {"default": digest(1)}


def test_a_version_that_was_retired_during_its_probe_stays_so() -> None:
    record = retire(add(three(), 4, state=VersionState.PROBING), "v4")
    with pytest.raises(AdapterConflict, match="retired before"):
        activate(record, digest(4))


def test_a_failed_version_says_why() -> None:
    record = fail(add(three(), 4, state=VersionState.PROBING), digest(4), reason="has no effect")
    assert resolve(record, "v4").reason == "has no effect"
    with pytest.raises(AdapterConflict, match="has no effect"):
        promote(record, alias="prod", version_ref="v4")
    with pytest.raises(AdapterNotFound):
        fail(record, digest(9), reason="x")


def test_an_aliased_version_can_neither_fail_nor_be_retired() -> None:
    with pytest.raises(AdapterConflict, match="default points at"):
        fail(three(), digest(1), reason="x")
    with pytest.raises(AdapterConflict, match="default points at"):
        retire(three(), "v1")


def test_a_retired_version_is_no_way_back() -> None:
    record = retire(promote(three(), alias="default", version_ref="v2"), "v1")
    with pytest.raises(AdapterConflict, match="nothing to go back to"):
        rollback(record)
    with pytest.raises(AdapterNotFound):
        resolve(record, "v1")


def test_a_retired_version_returns_under_its_old_number() -> None:
    record = add(retire(three(), "v2"), 2)
    assert resolve(record, "v2").state is VersionState.ACTIVE


def test_the_default_cannot_be_dropped_but_others_can() -> None:
    record = promote(three(), alias="prod", version_ref="v2")
    assert drop_alias(record, "prod").aliases == {"default": digest(1)}
    with pytest.raises(AdapterConflict):
        drop_alias(record, "default")
    with pytest.raises(AdapterNotFound):
        drop_alias(record, "canary")


def test_a_name_that_was_given_up_goes_on_with_its_numbers() -> None:
    gone = retire(three())
    assert gone.is_retired
    assert gone.aliases == {}
    back = revive(gone, add(None, 9, base_id="other"))
    back.check_invariants()
    assert back.aliases == {"default": digest(9)}
    assert (resolve(back).label, back.base_id) == ("v4", "other")
    assert back.generation == gone.generation + 1


def test_pruning_keeps_the_newest_and_everything_that_is_named() -> None:
    record = None
    for number in range(1, 13):
        record = add(record, number)
    assert record is not None
    record = promote(record, alias="prod", version_ref="v2")
    record = promote(record, alias="prod", version_ref="v3")

    kept = prune(record, num_kept=2)

    assert [entry.number for entry in kept.versions] == [1, 2, 3, 11, 12]
    assert prune(kept, num_kept=2) is kept
    assert add(prune(record, num_kept=0), 99).versions[-1].number == 13


def test_pruning_forgets_what_was_retired() -> None:
    record = prune(retire(three(), "v3"))
    assert [entry.number for entry in record.versions] == [1, 2]
    assert [entry.number for entry in add(record, 3).versions] == [1, 2, 4]


class RecordLife(RuleBasedStateMachine):
    """Any order of changes keeps the invariants, and a refused one changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.record: AdapterRecord | None = None
        self.numbers: set[int] = set()

    def change(self, after: AdapterRecord) -> None:
        before = self.record
        if before is not None:
            grew = after is not before
            assert after.generation == before.generation + grew
        self.record = after
        known = {} if before is None else {e.digest: e.number for e in before.versions}
        for entry in after.versions:
            if entry.digest in known:
                assert entry.number == known[entry.digest]
            else:
                assert entry.number not in self.numbers
                self.numbers.add(entry.number)

    @rule(number=st.integers(1, 6), with_promote=st.booleans(), probing=st.booleans())
    def publish(self, number: int, *, with_promote: bool, probing: bool) -> None:
        state = VersionState.PROBING if probing else VersionState.ACTIVE
        self.change(add(self.record, number, promote=with_promote, state=state))

    @precondition(lambda self: self.record)
    @rule(number=st.integers(1, 6))
    def probe_ends(self, number: int) -> None:
        assert self.record is not None
        entry = self.record.find(digest(number))
        if entry is not None and entry.state is VersionState.PROBING:
            even = number % 2 == 0
            self.change(
                activate(self.record, digest(number))
                if even
                else fail(self.record, digest(number), reason="odd")
            )

    @precondition(lambda self: self.record)
    @rule(alias=st.sampled_from(["default", "prod"]), ref=st.sampled_from(["v1", "v3", "prod"]))
    def promote(self, alias: str, ref: str) -> None:
        assert self.record is not None
        try:
            after = promote(self.record, alias=alias, version_ref=ref)
        except (AdapterConflict, AdapterNotFound):
            return
        assert resolve(after, alias).digest == resolve(self.record, ref).digest
        self.change(after)

    @precondition(lambda self: self.record)
    @rule(alias=st.sampled_from(["default", "prod"]))
    def roll_back(self, alias: str) -> None:
        assert self.record is not None
        expected = self.record.previous.get(alias)
        try:
            after = rollback(self.record, alias)
        except (AdapterConflict, AdapterNotFound):
            assert expected is None
            return
        assert after.aliases[alias] == expected
        assert after.previous[alias] == self.record.aliases[alias]
        self.change(after)

    @precondition(lambda self: self.record)
    @rule(number=st.integers(1, 6))
    def retire_one(self, number: int) -> None:
        assert self.record is not None
        try:
            self.change(retire(self.record, f"v{number}"))
        except (AdapterConflict, AdapterNotFound):
            return

    @precondition(lambda self: self.record)
    @rule()
    def give_up(self) -> None:
        assert self.record is not None
        self.change(retire(self.record))

    @precondition(lambda self: self.record)
    @rule(num_kept=st.integers(0, 3))
    def prune(self, num_kept: int) -> None:
        assert self.record is not None
        aliases = self.record.aliases
        self.change(prune(self.record, num_kept=num_kept))
        assert self.record.aliases == aliases

    @invariant()
    def holds(self) -> None:
        if self.record is not None:
            self.record.check_invariants()


TestRecordLife = RecordLife.TestCase
