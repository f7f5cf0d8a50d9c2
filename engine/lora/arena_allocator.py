"""Hands out contiguous rank rows of one arena group; integers only."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Rows [src_row0, src_row0 + num_rows) become [dst_row0, …); always downwards."""

    src_row0: int
    dst_row0: int
    num_rows: int


class ArenaAllocator:
    """First fit over `num_rows` rows, with a plan to compact them where first fit finds no place.

    Only AdapterResidency calls it. Knows spans, not adapters.
    """

    def __init__(self, num_rows: int) -> None:
        assert num_rows >= 0, "a group may be empty, not less"
        self.num_rows = num_rows
        self._spans: dict[int, int] = {}  # row0 → num_rows

    @property
    def num_free_rows(self) -> int:
        """Rows in nobody's span, contiguous or not."""
        return self.num_rows - sum(self._spans.values())

    def allocate(self, num_rows: int) -> int | None:
        """Take the lowest free run of at least `num_rows` rows; None if there is none."""
        assert num_rows > 0, "an adapter without rows in a group has no span there"
        cursor = 0
        for row0, length in sorted(self._spans.items()):
            if row0 - cursor >= num_rows:
                break
            cursor = row0 + length
        if self.num_rows - cursor < num_rows:
            return None
        self._spans[cursor] = num_rows
        return cursor

    def free(self, row0: int, num_rows: int) -> None:
        """Give a whole span back; giving back what isn't held is an error."""
        held = self._spans.pop(row0, None)
        assert held == num_rows, f"rows {row0}…{row0 + num_rows} are not one held span"

    def plan_moves(
        self,
        num_rows: int,
        *,
        movable: AbstractSet[int],
        freed: AbstractSet[int] = frozenset(),
    ) -> tuple[Move, ...] | None:
        """Return moves after which `num_rows` can be had, few if few are enough, or None.

        movable  row0 of the spans that may move; the others stay where they are
        freed    row0 of spans that will have been freed before

        Spans slide down in order, never past one that can't move, until a free run is long enough.
        So the answer is None for some arrangements that a cleverer packing could serve: only while
        spans that can't move are in the way, which is until their loads or leases end.
        """
        spans = sorted(item for item in self._spans.items() if item[0] not in freed)
        if _has_run(spans, num_rows, self.num_rows):
            return ()
        moves: list[Move] = []
        cursor = 0
        for row0, length in spans:
            if row0 - cursor >= num_rows:
                return tuple(moves)
            if row0 in movable:
                if row0 > cursor:
                    moves.append(Move(src_row0=row0, dst_row0=cursor, num_rows=length))
                cursor += length
            else:
                cursor = row0 + length
        return tuple(moves) if self.num_rows - cursor >= num_rows else None

    def apply(self, moves: tuple[Move, ...]) -> None:
        """Record moves, in their order."""
        for move in moves:
            held = self._spans.pop(move.src_row0)
            assert held == move.num_rows, "whole spans move"
            self._spans[move.dst_row0] = held

    def spans(self) -> dict[int, int]:
        """Return num_rows by row0 of every held span."""
        return dict(self._spans)

    def check_invariants(self) -> None:
        """Held spans are disjoint and inside; free and held rows are all rows."""
        end = 0
        for row0, length in sorted(self._spans.items()):
            assert length > 0, "no span is empty"
            assert row0 >= end, "spans are disjoint"
            end = row0 + length
        assert end <= self.num_rows, "spans lie inside the group"
        assert self.num_free_rows >= 0, "no row is held twice"


def _has_run(spans: list[tuple[int, int]], num_rows: int, end: int) -> bool:
    """Say whether a free run of `num_rows` rows lies between the sorted spans or behind them."""
    cursor = 0
    for row0, length in spans:
        if row0 - cursor >= num_rows:
            return True
        cursor = row0 + length
    return end - cursor >= num_rows
