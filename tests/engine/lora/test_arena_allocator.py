"""Rows are one owner's at a time, first fit, and can be compacted."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.lora.arena_allocator import ArenaAllocator, Move

NUM_ROWS = 20


class AllocatorMachine(RuleBasedStateMachine):
    """The model is a list of rows, each with its owner's number or None."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ArenaAllocator(NUM_ROWS)
        self.rows: list[int | None] = [None] * NUM_ROWS
        self.next_owner = 0

    def free_run(self, num_rows: int) -> int | None:
        for row0 in range(NUM_ROWS - num_rows + 1):
            if self.rows[row0 : row0 + num_rows] == [None] * num_rows:
                return row0
        return None

    def spans(self) -> dict[int, int]:
        owners = dict.fromkeys(owner for owner in self.rows if owner is not None)
        return {self.rows.index(owner): self.rows.count(owner) for owner in owners}

    @rule(num_rows=st.integers(1, 9))
    def allocate(self, num_rows: int) -> None:
        expected = self.free_run(num_rows)
        row0 = self.allocator.allocate(num_rows)
        assert row0 == expected
        if row0 is not None:
            self.rows[row0 : row0 + num_rows] = [self.next_owner] * num_rows
            self.next_owner += 1

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        spans = self.spans()
        if spans:
            row0 = data.draw(st.sampled_from(sorted(spans)))
            self.allocator.free(row0, spans[row0])
            self.rows[row0 : row0 + spans[row0]] = [None] * spans[row0]

    @rule(num_rows=st.integers(1, 12), data=st.data())
    def compact(self, num_rows: int, data: st.DataObject) -> None:
        """Moves, carried out one after the other, keep every owner's rows together and whole."""
        spans = self.spans()
        fixed = data.draw(st.sets(st.sampled_from(sorted(spans)))) if spans else set()
        moves = self.allocator.plan_moves(num_rows, movable=spans.keys() - fixed)
        if moves is None:
            assert self.free_run(num_rows) is None
            assert fixed or self.rows.count(None) < num_rows, "all that could move has moved"
            return
        counts = {owner: self.rows.count(owner) for owner in self.rows}
        for move in moves:
            assert move.src_row0 not in fixed
            self.carry_out(move)
        self.allocator.apply(moves)
        assert {owner: self.rows.count(owner) for owner in self.rows} == counts
        assert self.spans() == self.allocator.spans()
        assert self.free_run(num_rows) is not None
        self.allocate(num_rows)

    def carry_out(self, move: Move) -> None:
        assert move.dst_row0 < move.src_row0
        moved = self.rows[move.src_row0 : move.src_row0 + move.num_rows]
        assert len(set(moved)) == 1
        below = self.rows[move.dst_row0 : move.src_row0]
        free = min(len(below), move.num_rows)
        assert below[:free] == [None] * free, "nobody's rows are written over"
        self.rows[move.src_row0 : move.src_row0 + move.num_rows] = [None] * move.num_rows
        self.rows[move.dst_row0 : move.dst_row0 + move.num_rows] = moved

    @rule(num_rows=st.integers(1, 12), data=st.data())
    def planning_with_freed_spans_is_planning_after_freeing_them(
        self, num_rows: int, data: st.DataObject
    ) -> None:
        spans = self.spans()
        freed = data.draw(st.sets(st.sampled_from(sorted(spans)))) if spans else set()
        smaller = ArenaAllocator(NUM_ROWS)
        for row0, length in spans.items():
            # Place each where it is, by holding everything below it for a moment.
            if row0 not in freed:
                fill(smaller, row0, length)
        movable = spans.keys() - freed
        assert self.allocator.plan_moves(
            num_rows, movable=movable, freed=freed
        ) == smaller.plan_moves(num_rows, movable=movable)

    @invariant()
    def books_agree(self) -> None:
        self.allocator.check_invariants()
        assert self.allocator.spans() == self.spans()
        assert self.allocator.num_free_rows == self.rows.count(None)


def fill(allocator: ArenaAllocator, row0: int, num_rows: int) -> None:
    """Take exactly these rows of an allocator whose rows from row0 on are free."""
    fillers = []
    while (place := allocator.allocate(1)) is not None and place < row0:
        fillers.append(place)
    assert place == row0
    allocator.free(row0, 1)
    assert allocator.allocate(num_rows) == row0
    for filler in fillers:
        allocator.free(filler, 1)


TestAllocatorMachine = AllocatorMachine.TestCase


def test_only_as_much_moves_as_is_needed() -> None:
    allocator = ArenaAllocator(20)
    starts = [allocator.allocate(4) for _ in range(5)]
    assert starts == [0, 4, 8, 12, 16]
    for row0 in (0, 8, 16):
        allocator.free(row0, 4)
    assert allocator.plan_moves(4, movable={4, 12}) == ()
    assert allocator.plan_moves(8, movable={4, 12}) == (Move(src_row0=4, dst_row0=0, num_rows=4),)
    assert allocator.plan_moves(8, movable={12}) == (Move(src_row0=12, dst_row0=8, num_rows=4),)
    assert allocator.plan_moves(8, movable=set()) is None
    assert allocator.plan_moves(13, movable={4, 12}) is None


def test_giving_back_what_is_not_held_is_an_error() -> None:
    allocator = ArenaAllocator(8)
    row0 = allocator.allocate(4)
    assert row0 == 0
    with pytest.raises(AssertionError):
        allocator.free(0, 3)
