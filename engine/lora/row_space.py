"""The rank rows of all arena groups together: who has which, and how room is made."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from engine.lora.arena_allocator import ArenaAllocator, Move


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMove:
    """Rows that must change place in one arena group."""

    group: str
    move: Move


@dataclass(slots=True, kw_only=True, eq=False)
class HeldRows:
    """One version's table row, and its span in each group. Only RowSpace writes row0.

    row0      changes when room is made for others, if the holder says `can_move`
    can_move  whether the rows are complete, so that compaction may take them along
    """

    lora_index: int
    num_rows: Mapping[str, int]
    row0: dict[str, int]
    can_move: bool = False


class RowSpace:
    """Divides the rows of every group among versions. Only AdapterResidency calls it.

    Table rows (lora_index) are handed out here too, the smallest free one first, so that the
    arena's tables stay as small as the number of versions in it.
    """

    def __init__(self, allocators: Mapping[str, ArenaAllocator]) -> None:
        self._allocators = dict(allocators)
        self._held: list[HeldRows] = []

    @property
    def num_rows(self) -> dict[str, int]:
        """All rows by group."""
        return {group: allocator.num_rows for group, allocator in self._allocators.items()}

    @property
    def num_free_rows(self) -> dict[str, int]:
        """Rows in nobody's span by group."""
        return {group: allocator.num_free_rows for group, allocator in self._allocators.items()}

    def short_groups(
        self, num_rows: Mapping[str, int], *, without: Collection[HeldRows] = ()
    ) -> set[str]:
        """Return the groups in which `num_rows` can't be had, were `without` freed before."""
        return {
            group
            for group, wanted in num_rows.items()
            if self._plan_moves(group, wanted, without) is None
        }

    def take(self, num_rows: Mapping[str, int]) -> tuple[HeldRows, tuple[GroupMove, ...]]:
        """Hold rows in every group, compacting as far as needed; no group may be short.

        Returns the moves by which the arena must follow before the rows are written.
        """
        moves: list[GroupMove] = []
        row0: dict[str, int] = {}
        for group, wanted in num_rows.items():
            moves += self._make_room(group, wanted)
            place = self._allocators[group].allocate(wanted)
            assert place is not None, "room was made"
            row0[group] = place
        held = HeldRows(lora_index=self._free_index(), num_rows=dict(num_rows), row0=row0)
        self._held.append(held)
        return held, tuple(moves)

    def free(self, held: HeldRows) -> None:
        """Give rows and table row back."""
        self._held.remove(held)
        for group, row0 in held.row0.items():
            self._allocators[group].free(row0, held.num_rows[group])

    def holds_exactly(self, holders: Collection[HeldRows]) -> bool:
        """Say whether these are all the holders there are."""
        return len(holders) == len(self._held) and all(held in holders for held in self._held)

    def check_invariants(self) -> None:
        """Every held row is exactly one holder's, and so is every table row."""
        for group, allocator in self._allocators.items():
            allocator.check_invariants()
            holders = [held for held in self._held if group in held.row0]
            spans = {held.row0[group]: held.num_rows[group] for held in holders}
            assert spans == allocator.spans(), "every held row is some holder's"
        for held in self._held:
            assert held.row0.keys() == held.num_rows.keys(), "a span in every group"
        indices = [held.lora_index for held in self._held]
        assert len(indices) == len(set(indices)), "no table row is shared"

    def _plan_moves(
        self, group: str, num_rows: int, without: Collection[HeldRows]
    ) -> tuple[Move, ...] | None:
        holders = [held for held in self._held if group in held.row0]
        return self._allocators[group].plan_moves(
            num_rows,
            movable={held.row0[group] for held in holders if held.can_move},
            freed={held.row0[group] for held in holders if held in without},
        )

    def _make_room(self, group: str, num_rows: int) -> list[GroupMove]:
        moves = self._plan_moves(group, num_rows, ())
        assert moves is not None, "no group is short"
        self._allocators[group].apply(moves)
        new_row0 = {move.src_row0: move.dst_row0 for move in moves}
        for held in self._held:
            if held.row0.get(group) in new_row0:
                held.row0[group] = new_row0[held.row0[group]]
        return [GroupMove(group=group, move=move) for move in moves]

    def _free_index(self) -> int:
        used = {held.lora_index for held in self._held}
        return next(index for index in range(len(used) + 1) if index not in used)
