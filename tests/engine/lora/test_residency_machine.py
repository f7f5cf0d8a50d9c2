"""Any order of claims, leases, loads, failures and unloads; the oracle knows only what is fair."""

from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import AdapterConflict, AdapterRefused
from engine.lora.arena_allocator import ArenaAllocator
from engine.lora.residency import AdapterResidency, Lease, PendingLoad

NUM_ROWS = {"attention": 12, "mlp": 6}
LORA_IDS = [f"adapter-{number}@0123456789ab" for number in range(5)]
ids = st.sampled_from(LORA_IDS)


@dataclass(slots=True)
class Model:
    """One version as an outsider counts it."""

    num_rows: dict[str, int]
    state: str = "absent"
    num_claims: int = 0
    leases: list[Lease] = field(default_factory=list)
    is_written_to: bool = False
    idle_order: int = 0

    @property
    def is_idle(self) -> bool:
        return self.state == "resident" and not self.leases and self.num_claims == 0


class ResidencyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ticks = 0
        allocator = {group: ArenaAllocator(rows) for group, rows in NUM_ROWS.items()}
        self.residency = AdapterResidency(allocator=allocator, clock=self.tick)
        self.models: dict[str, Model] = {}
        self.wanted: list[str] = []
        self.loading: list[PendingLoad] = []
        # What an arena that obeys every PendingLoad would hold: owner by group and row.
        self.rows: dict[str, list[str | None]] = {g: [None] * n for g, n in NUM_ROWS.items()}

    def tick(self) -> float:
        self.ticks += 1
        return float(self.ticks)

    # Actions

    @initialize(rows=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3)), min_size=4))
    def begin_with_some(self, rows: list[tuple[int, int]]) -> None:
        for lora_id, (attention, mlp) in zip(LORA_IDS, rows, strict=False):
            self.add(lora_id, attention, mlp)

    @rule(lora_id=ids)
    def bring_in(self, lora_id: str) -> None:
        """What one short request does while others hold what they hold."""
        model = self.models.get(lora_id)
        if model is None or model.state != "absent" or self.wanted:
            return
        self.claim(lora_id)
        self.next_load()
        if model.state == "loading":
            self.finish(next(one for one in self.loading if one.lora_id == lora_id))
        self.unclaim(lora_id)

    @rule(lora_id=ids, attention=st.integers(0, 13), mlp=st.integers(0, 7))
    def add(self, lora_id: str, attention: int, mlp: int) -> None:
        num_rows = {"attention": attention, "mlp": mlp}

        def call() -> None:
            self.residency.add(
                lora_id,
                content_digest=f"sha256:{lora_id}",
                image=Path("x.arena"),
                num_rows=num_rows,
                max_rank=1,
            )

        if lora_id in self.models:
            with pytest.raises(AdapterConflict):
                call()
        elif attention > NUM_ROWS["attention"] or mlp > NUM_ROWS["mlp"]:
            with pytest.raises(AdapterRefused):
                call()
        else:
            call()
            self.models[lora_id] = Model({g: n for g, n in num_rows.items() if n > 0})

    @rule(lora_id=ids)
    def claim(self, lora_id: str) -> None:
        model = self.models.get(lora_id)
        if model is None or model.state == "draining":
            assert not self.residency.knows(lora_id)
            return
        self.residency.claim(lora_id)
        model.num_claims += 1
        if model.state == "absent" and lora_id not in self.wanted:
            self.wanted.append(lora_id)

    @rule(lora_id=ids)
    def unclaim(self, lora_id: str) -> None:
        model = self.models.get(lora_id)
        if model is not None and model.num_claims > 0:
            self.residency.unclaim(lora_id)
            model.num_claims -= 1
            self.settle(lora_id)

    @rule(lora_id=ids)
    def lease(self, lora_id: str) -> None:
        model = self.models.get(lora_id)
        if model is not None:
            lease = self.residency.lease(lora_id)
            assert (lease is not None) == (model.state == "resident")
            if lease is not None:
                model.leases.append(lease)

    @rule(lora_id=ids)
    def release(self, lora_id: str) -> None:
        model = self.models.get(lora_id)
        if model is not None and model.leases:
            self.residency.release(model.leases.pop())
            self.settle(lora_id)

    @rule()
    def next_load(self) -> None:
        idle_before = [lora_id for lora_id, model in self.models.items() if model.is_idle]
        pending = self.residency.next_load()
        if pending is None:
            self.check_that_nothing_could_be_loaded()
            return
        hypothesis.event("evicts" if pending.evicted else "evicts nothing")
        hypothesis.event("moves" if pending.moves else "moves nothing")
        assert pending.lora_id in self.wanted
        self.wanted.remove(pending.lora_id)
        evicted = self.evict(pending)
        assert len(evicted) == len(pending.evicted)
        assert set(evicted) <= set(idle_before)
        self.check_that_order_was_kept(evicted, idle_before)
        for step in pending.moves:
            self.carry_out(step.group, step.move)
        model = self.models[pending.lora_id]
        assert {g: span.num_rows for g, span in pending.spans.items()} == model.num_rows
        for group, span in pending.spans.items():
            rows = slice(span.row0, span.row0 + span.num_rows)
            assert self.rows[group][rows] == [None] * span.num_rows, "rows are nobody else's"
            self.rows[group][rows] = [pending.lora_id] * span.num_rows
        model.state, model.is_written_to = "loading", True
        self.loading.append(pending)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def load_done(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(self.loading)))

    def finish(self, pending: PendingLoad) -> None:
        self.loading.remove(pending)
        model = self.models[pending.lora_id]
        self.residency.loaded(pending.lora_id)
        model.is_written_to = False
        if model.state == "loading":
            model.state = "resident"
        self.settle(pending.lora_id)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def load_failed(self, data: st.DataObject) -> None:
        pending = data.draw(st.sampled_from(self.loading))
        self.loading.remove(pending)
        self.residency.load_failed(pending.lora_id, "broken")
        model = self.models[pending.lora_id]
        model.state, model.is_written_to = "draining", False
        self.settle(pending.lora_id)

    @rule(lora_id=ids)
    def unload(self, lora_id: str) -> None:
        if lora_id in self.models:
            self.residency.unload(lora_id)
            self.models[lora_id].state = "draining"
            if lora_id in self.wanted:
                self.wanted.remove(lora_id)
            self.settle(lora_id)

    # The oracle

    def settle(self, lora_id: str) -> None:
        """What follows when a hold or a load has ended."""
        model = self.models[lora_id]
        if model.num_claims == 0 and lora_id in self.wanted:
            self.wanted.remove(lora_id)
        if model.is_idle:
            model.idle_order = self.ticks
        held = bool(model.leases) or model.num_claims > 0 or model.is_written_to
        if model.state == "draining" and not held:
            assert lora_id in [gone.lora_id for gone in self.residency.take_gone()]
            assert self.residency.finish_unload(lora_id)
            self.forget_rows(lora_id)
            del self.models[lora_id]
        else:
            assert self.residency.take_gone() == []

    def forget_rows(self, lora_id: str) -> None:
        for group, owners in self.rows.items():
            self.rows[group] = [None if owner == lora_id else owner for owner in owners]

    def evict(self, pending: PendingLoad) -> list[str]:
        """Find out by their states which versions were evicted."""
        now = {status.lora_id: status.state for status in self.residency.statuses()}
        evicted = [
            lora_id
            for lora_id, model in self.models.items()
            if model.state == "resident" and now[lora_id] == "absent"
        ]
        for lora_id in evicted:
            self.models[lora_id].state = "absent"
            self.forget_rows(lora_id)
        return evicted

    def check_that_order_was_kept(self, evicted: list[str], idle_before: list[str]) -> None:
        """Whoever was spared though idle for longer has no rows in any group of the evicted."""
        for spared in set(idle_before) - set(evicted):
            for lora_id in evicted:
                if self.models[spared].idle_order < self.models[lora_id].idle_order:
                    groups = set.intersection(
                        *(set(self.models[one].num_rows) for one in (spared, lora_id))
                    )
                    assert len(groups) < len(self.models[lora_id].num_rows)

    def carry_out(self, group: str, move) -> None:
        owners = self.rows[group]
        moved = owners[move.src_row0 : move.src_row0 + move.num_rows]
        assert len(set(moved)) == 1
        assert self.models[moved[0]].state == "resident", "only resident versions move"
        owners[move.src_row0 : move.src_row0 + move.num_rows] = [None] * move.num_rows
        place = slice(move.dst_row0, move.dst_row0 + move.num_rows)
        assert owners[place] == [None] * move.num_rows
        owners[place] = moved

    def check_that_nothing_could_be_loaded(self) -> None:
        """With nothing in the way that can't move, free and idle rows would have been enough."""
        fixed = {m.state for m in self.models.values() if any(m.num_rows)} & {"loading", "draining"}
        if fixed:
            return
        for lora_id in self.wanted:
            assert any(
                wanted
                > self.rows[group].count(None)
                + sum(m.num_rows.get(group, 0) for m in self.models.values() if m.is_idle)
                for group, wanted in self.models[lora_id].num_rows.items()
            ), f"{lora_id} could have been loaded"

    @invariant()
    def books_agree(self) -> None:
        self.residency.check_invariants()
        statuses = {status.lora_id: status for status in self.residency.statuses()}
        assert statuses.keys() == self.models.keys()
        for lora_id, model in self.models.items():
            status = statuses[lora_id]
            assert status.state == model.state
            assert status.num_claims == model.num_claims
            assert status.num_leases == len(model.leases)
            assert self.residency.knows(lora_id) == (model.state != "draining")
        free = {group: owners.count(None) for group, owners in self.rows.items()}
        assert self.residency.num_free_rows == free


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = hypothesis.settings(stateful_step_count=60)
