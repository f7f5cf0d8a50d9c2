"""Which adapter versions live in the arena: claims, leases, loads, evictions, unloads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import AdapterConflict, AdapterRefused, UnknownAdapter
from engine.lora.arena_allocator import ArenaAllocator
from engine.lora.local_version import ArenaState, LocalVersion
from engine.lora.row_space import GroupMove, HeldRows, RowSpace
from engine.protocol import ResidentAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One admitted request's hold on a resident version; given back exactly once."""

    lora_id: str
    lora_index: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpan:
    """Rank rows [row0, row0 + num_rows) of one arena group."""

    row0: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingLoad:
    """A version that has been given rows, and what must happen before they are written.

    evicted  lora_index of the versions that lost their rows, to be cleared first
    moves    of resident versions' rows, to be made next, in order, before any step runs
    spans    the new version's rows by group; groups without rows are left out
    """

    lora_id: str
    lora_index: int
    image: Path
    spans: Mapping[str, RowSpan]
    evicted: tuple[int, ...]
    moves: tuple[GroupMove, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoneAdapter:
    """A version that has been forgotten; its image may be deleted.

    failure  why its load failed, in words; None if it was unloaded
    """

    lora_id: str
    lora_index: int | None
    image: Path
    failure: str | None


class AdapterResidency:
    """Decides which adapter versions live in the arena of this worker.

    Holds no tensors: Arena stores the rows, ArenaWriter fills them. Only Scheduler calls claim,
    unclaim, lease and release, so that a plan and its leases can't disagree (and AdapterProber, for
    a step of its own); only the core's loop calls the rest, between steps.

    A queued request claims a version, which starts its load; an admitted one leases it. Only
    RESIDENT versions without lease and claim are evicted, the least recently released first.
    """

    def __init__(
        self, *, allocator: Mapping[str, ArenaAllocator], clock: Callable[[], float]
    ) -> None:
        self._space = RowSpace(allocator)
        self._clock = clock
        self._entries: dict[str, LocalVersion] = {}
        # Claimed ABSENT versions, oldest claim first.
        self._wanted: dict[str, None] = {}
        self._gone: list[GoneAdapter] = []
        self._next_lease_number = 0
        self.num_loads = 0
        self.num_evictions = 0

    def add(
        self,
        lora_id: str,
        *,
        content_digest: str,
        image: Path,
        num_rows: Mapping[str, int],
        max_rank: int,
    ) -> None:
        """Make a version known; its image is on disk, rows are taken at the first claim.

        content_digest  "sha256:…" over what its files held
        num_rows        rank rows by arena group; a group may be left out

        Raises AdapterRefused, with both numbers, if it is wider than an empty arena, and
        AdapterConflict if the lora_id is known or still draining.
        """
        if lora_id in self._entries:
            state = self._entries[lora_id].state
            word = "being unloaded" if state is ArenaState.DRAINING else "already loaded"
            raise AdapterConflict(f"adapter {lora_id!r} is {word}")
        problems = []
        for group, rows in num_rows.items():
            room = self._space.num_rows.get(group, 0)
            if rows > room:
                problems.append(
                    f"the adapter needs {rows} rank rows in group {group!r}, "
                    f"but the whole arena has {room}"
                )
        if problems:
            raise AdapterRefused(problems)
        rows_needed = {group: rows for group, rows in num_rows.items() if rows > 0}
        self._entries[lora_id] = LocalVersion(
            lora_id=lora_id,
            content_digest=content_digest,
            image=image,
            num_rows=rows_needed,
            max_rank=max_rank,
        )

    def knows(self, lora_id: str) -> bool:
        """Say whether requests may name this version: known, and not draining."""
        entry = self._entries.get(lora_id)
        return entry is not None and entry.state is not ArenaState.DRAINING

    def content_digest(self, lora_id: str) -> str:
        """Return "sha256:…" over the weights that `lora_id` means here; raises UnknownAdapter.

        A name can come back with other weights, a digest can't: whatever was computed with an
        adapter is keyed by this.
        """
        return self._entry(lora_id).content_digest

    def is_draining(self, lora_id: str) -> bool:
        """Say whether this version is being forgotten, but not gone."""
        entry = self._entries.get(lora_id)
        return entry is not None and entry.state is ArenaState.DRAINING

    def unload(self, lora_id: str) -> None:
        """Begin to forget a version: no new claim or lease, and gone when the last hold ends.

        The caller ends the requests that hold it. Does nothing to a version that is draining.
        """
        self._drain(self._entry(lora_id))

    def finish_unload(self, lora_id: str) -> bool:
        """Say whether an unload has come to its end."""
        return not self.is_draining(lora_id)

    def take_gone(self) -> list[GoneAdapter]:
        """Return the versions that have gone since the last call, unloaded or failed.

        Whoever deletes their images does so before a version of the same name is laid out again.
        """
        gone, self._gone = self._gone, []
        return gone

    def claim(self, lora_id: str) -> None:
        """Count a queued request; starts the load if the version has no rows.

        Raises UnknownAdapter, or AdapterConflict for a version that is draining.
        """
        entry = self._entry(lora_id)
        if entry.state is ArenaState.DRAINING:
            raise AdapterConflict(f"adapter {lora_id!r} is being unloaded")
        entry.num_claims += 1
        if entry.state is ArenaState.ABSENT:
            self._wanted.setdefault(lora_id)

    def unclaim(self, lora_id: str) -> None:
        """Take one claim back; taking back what isn't held is an error."""
        entry = self._entry(lora_id)
        assert entry.num_claims > 0, f"{lora_id} has no claim"
        entry.num_claims -= 1
        self._settle(entry)

    def lease(self, lora_id: str) -> Lease | None:
        """Hold a version for one request, or return None if it can't run in this step.

        None means "ask again next step": it isn't resident yet, or is draining. A claim is kept.
        """
        entry = self._entry(lora_id)
        if entry.state is not ArenaState.RESIDENT:
            return None
        assert entry.rows is not None, "a resident version has rows"
        self._next_lease_number += 1
        lease = Lease(
            lora_id=lora_id, lora_index=entry.rows.lora_index, number=self._next_lease_number
        )
        entry.lease_numbers.add(lease.number)
        return lease

    def release(self, lease: Lease) -> None:
        """Give a lease back; giving it back twice is an error."""
        entry = self._entry(lease.lora_id)
        assert lease.number in entry.lease_numbers, f"{lease.lora_id}: lease released twice"
        entry.lease_numbers.remove(lease.number)
        self._settle(entry)

    def next_load(self) -> PendingLoad | None:
        """Give rows to the oldest claimed absent version for which rows can be had.

        Evicts and compacts as far as needed, and no further; None changes nothing. The caller
        carries out what PendingLoad says before another step runs.
        """
        for lora_id in self._wanted:
            entry = self._entries[lora_id]
            victims = self._choose_victims(entry)
            if victims is not None:
                return self._start_load(entry, victims)
        return None

    def loaded(self, lora_id: str) -> None:
        """Record that all rows are written; the version can run, unless it is draining."""
        entry = self._entry(lora_id)
        assert entry.is_written_to, f"{lora_id} has no load under way"
        entry.is_written_to = False
        if entry.state is ArenaState.LOADING:
            assert entry.rows is not None, "a loading version has rows"
            entry.state = ArenaState.RESIDENT
            entry.rows.can_move = True
            self.num_loads += 1
        self._settle(entry)

    def load_failed(self, lora_id: str, message: str) -> None:
        """Record that a load ended without rows: the version drains, and is gone when unclaimed.

        It isn't tried again, since the image is at fault; a new add() may bring a better one. The
        caller ends the requests that claim it.
        """
        entry = self._entry(lora_id)
        assert entry.is_written_to, f"{lora_id} has no load under way"
        entry.is_written_to = False
        entry.failure = message
        self._drain(entry)

    def statuses(self) -> list[ResidentAdapter]:
        """Return every known version, as it truly is."""
        return [
            ResidentAdapter(
                lora_id=entry.lora_id,
                tier="disk",
                state=entry.state.value,
                max_rank=entry.max_rank,
                num_rows=dict(entry.num_rows),
                num_leases=len(entry.lease_numbers),
                num_claims=entry.num_claims,
            )
            for entry in self._entries.values()
        ]

    @property
    def num_rows(self) -> dict[str, int]:
        """Return all rows by group."""
        return self._space.num_rows

    @property
    def num_free_rows(self) -> dict[str, int]:
        """Return the rows in nobody's span by group."""
        return self._space.num_free_rows

    def check_invariants(self) -> None:
        """Rows, table rows, claims and leases all add up."""
        self._space.check_invariants()
        held = [held for e in self._entries.values() if (held := e.rows) is not None]
        assert self._space.holds_exactly(held), "every held row is some version's"
        for entry in self._entries.values():
            entry.check_invariants()
            is_wanted = entry.state is ArenaState.ABSENT and entry.num_claims > 0
            assert is_wanted == (entry.lora_id in self._wanted), "claimed and absent is wanted"
        assert self._wanted.keys() <= self._entries.keys(), "only known versions are wanted"

    def _entry(self, lora_id: str) -> LocalVersion:
        entry = self._entries.get(lora_id)
        if entry is None:
            raise UnknownAdapter(f"no adapter {lora_id!r} is loaded here")
        return entry

    def _settle(self, entry: LocalVersion) -> None:
        """Draw the consequences of a hold or a load that has ended."""
        if entry.num_claims == 0:
            self._wanted.pop(entry.lora_id, None)
        if entry.is_idle:
            entry.idle_since_s = self._clock()
        if entry.state is ArenaState.DRAINING and not entry.is_held and not entry.is_written_to:
            lora_index = None if entry.rows is None else entry.rows.lora_index
            self._take_rows(entry)
            del self._entries[entry.lora_id]
            self._gone.append(
                GoneAdapter(
                    lora_id=entry.lora_id,
                    lora_index=lora_index,
                    image=entry.image,
                    failure=entry.failure,
                )
            )

    def _drain(self, entry: LocalVersion) -> None:
        if entry.state is not ArenaState.DRAINING:
            entry.state = ArenaState.DRAINING
            self._wanted.pop(entry.lora_id, None)
            if entry.rows is not None:
                entry.rows.can_move = False
        self._settle(entry)

    def _take_rows(self, entry: LocalVersion) -> None:
        if entry.rows is not None:
            self._space.free(entry.rows)
            entry.rows = None

    def _choose_victims(self, entry: LocalVersion) -> list[LocalVersion] | None:
        """Return the versions to evict so that `entry` fits, least recently used first; or None."""
        idle = [candidate for candidate in self._entries.values() if candidate.is_idle]
        idle.sort(key=lambda candidate: candidate.idle_since_s)
        victims: list[LocalVersion] = []
        freed: list[HeldRows] = []
        while short := self._space.short_groups(entry.num_rows, without=freed):
            # A victim without rows in a group that is short would be lost for nothing.
            victim = next((one for one in idle if short & one.num_rows.keys()), None)
            if victim is None:
                return None
            assert victim.rows is not None, "a resident version has rows"
            idle.remove(victim)
            victims.append(victim)
            freed.append(victim.rows)
        return victims

    def _start_load(self, entry: LocalVersion, victims: list[LocalVersion]) -> PendingLoad:
        evicted = [victim.rows.lora_index for victim in victims if victim.rows is not None]
        for victim in victims:
            self._take_rows(victim)
            victim.state = ArenaState.ABSENT
        self.num_evictions += len(victims)
        entry.rows, moves = self._space.take(entry.num_rows)
        entry.state = ArenaState.LOADING
        entry.is_written_to = True
        del self._wanted[entry.lora_id]
        return PendingLoad(
            lora_id=entry.lora_id,
            lora_index=entry.rows.lora_index,
            image=entry.image,
            spans={
                group: RowSpan(row0=row0, num_rows=entry.num_rows[group])
                for group, row0 in entry.rows.row0.items()
            },
            evicted=tuple(evicted),
            moves=moves,
        )
