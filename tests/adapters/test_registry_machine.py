"""Several gateways change the registry in any order; each change is all or nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis

from adapters.errors import AdapterConflict, AdapterNotFound
from adapters.record import AdapterRecord, promote, publish, retire, rollback
from adapters.registry import AdapterRegistry
from adapters.store import AdapterStore

NAMES = st.sampled_from(["json", "law"])


def publish_number(record: AdapterRecord | None, name: str, number: int) -> AdapterRecord:
    return publish(
        record,
        name=name,
        base_id="tiny",
        digest=f"sha256:{number:064x}",
        created="t",
        promote=number % 2 == 0,
    )


class RegistryLife(RuleBasedStateMachine):
    """The oracle is a dict of records; a gateway may hold a record that is no longer the newest."""

    url: str
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis = self.run(self.connect())
        self.folder.joinpath("journal.jsonl").unlink(missing_ok=True)
        self.store = AdapterStore(self.folder)
        self.registry = AdapterRegistry(self.redis, journal=self.store.journal())
        self.truth: dict[str, AdapterRecord] = {}
        self.held: dict[str, AdapterRecord | None] = {}

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    async def connect(self) -> Redis:
        client = Redis.from_url(self.url)
        await client.flushall()
        return client

    def teardown(self) -> None:
        self.run(self.redis.aclose())
        self.runner.close()

    def living(self, name: str) -> AdapterRecord | None:
        record = self.truth.get(name)
        return None if record is None or record.is_retired else record

    @rule(name=NAMES)
    def a_gateway_reads(self, name: str) -> None:
        self.held[name] = self.run(self.registry.get(name))
        assert self.held[name] == self.living(name)

    @precondition(lambda self: self.held)
    @rule(name=NAMES, number=st.integers(1, 5))
    def it_publishes_from_what_it_holds(self, name: str, number: int) -> None:
        before = self.held.get(name)
        self.commit(name, before, publish_number(before, name, number))

    @rule(name=NAMES, change=st.sampled_from(["promote", "rollback", "retire"]))
    def it_changes_what_it_holds(self, name: str, change: str) -> None:
        before = self.held.get(name)
        if before is None:
            return
        try:
            after = {
                "promote": lambda: promote(before, alias="default", version_ref="v2"),
                "rollback": lambda: rollback(before),
                "retire": lambda: retire(before),
            }[change]()
        except (AdapterConflict, AdapterNotFound):
            return
        self.commit(name, before, after)

    def commit(self, name: str, before: AdapterRecord | None, after: AdapterRecord) -> None:
        is_new = before in (self.living(name), self.truth.get(name))
        is_change = before is None or after.generation != before.generation
        try:
            stored = self.run(self.registry.commit(before, after, actor="", action=""))
        except AdapterConflict:
            assert not is_new
            return
        assert is_new or not is_change
        if is_change:
            self.truth[name] = self.held[name] = stored

    @rule(name=NAMES, number=st.integers(1, 5))
    def someone_updates(self, name: str, number: int) -> None:
        self.truth[name] = self.run(
            self.registry.update(
                name, lambda record: publish_number(record, name, number), actor="", action=""
            )
        )

    @rule()
    def redis_loses_everything(self) -> None:
        self.run(self.redis.flushall())
        self.run(self.registry.rebuild(self.store.journal(), self.store))

    @invariant()
    def every_gateway_sees_the_truth(self) -> None:
        expected = tuple(
            record for _, record in sorted(self.truth.items()) if not record.is_retired
        )
        assert self.run(self.registry.list()) == expected
        for record in self.truth.values():
            record.check_invariants()


def test_every_change_is_all_or_nothing(valkey_url: str, tmp_path: Path) -> None:
    machine = type("Machine", (RegistryLife,), {"url": valkey_url, "folder": tmp_path})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=20))


@pytest.mark.deep
def test_every_change_is_all_or_nothing_at_length(valkey_url: str, tmp_path: Path) -> None:
    machine = type("Machine", (RegistryLife,), {"url": valkey_url, "folder": tmp_path})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=300, stateful_step_count=60, deadline=None)
    )
