"""What a worker knows of one adapter version: its files, its rows, and who holds it."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from engine.lora.row_space import HeldRows


class ArenaState(Enum):
    """Where a version stands with the arena of this worker; the value goes on the wire.

    ABSENT    its image is on disk, it has no rows
    LOADING   it has rows, which are being written
    RESIDENT  it can run
    DRAINING  it is being forgotten: no new claim or lease; gone when the last hold ends
    """

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"


@dataclass(slots=True, kw_only=True)
class LocalVersion:
    """One version as AdapterResidency keeps it; nobody else writes it.

    content_digest  what its files held; equal digests mean equal weights, under any lora_id
    rows            where they are; None while it is absent
    is_written_to   a load is under way, even if the version has begun to drain meanwhile
    idle_since_s    when it was last released, or became resident without anybody waiting
    """

    lora_id: str
    content_digest: str
    image: Path
    num_rows: dict[str, int]
    max_rank: int
    state: ArenaState = ArenaState.ABSENT
    rows: HeldRows | None = None
    lease_numbers: set[int] = field(default_factory=set)
    num_claims: int = 0
    is_written_to: bool = False
    idle_since_s: float = 0.0
    failure: str | None = None

    @property
    def is_held(self) -> bool:
        """Whether a request needs it."""
        return self.num_claims > 0 or bool(self.lease_numbers)

    @property
    def is_idle(self) -> bool:
        """Whether its rows may be taken away."""
        return self.state is ArenaState.RESIDENT and not self.is_held

    def check_invariants(self) -> None:
        """Check what its state says about its rows and holds."""
        match self.state:
            case ArenaState.ABSENT:
                assert self.rows is None, "an absent version has no rows"
                assert not self.lease_numbers, "an absent version has no lease"
            case ArenaState.LOADING:
                assert self.is_written_to, "a loading version is written to"
                assert not self.lease_numbers, "a loading version has no lease"
            case ArenaState.RESIDENT:
                assert self.rows is not None, "a resident version has rows"
                assert not self.is_written_to, "a resident version is complete"
            case ArenaState.DRAINING:
                assert self.is_held or self.is_written_to, "what nobody holds is gone"
        can_move = self.rows is not None and self.rows.can_move
        assert can_move == (self.state is ArenaState.RESIDENT), "resident versions move, no others"
