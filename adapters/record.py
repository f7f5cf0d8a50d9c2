"""The life of an adapter's name as one immutable value and the pure functions that change it.

Every function returns a new record of the next generation, or the very same record when nothing
would change. The registry stores the result if the generation it came from is still there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from adapters.errors import AdapterConflict, AdapterNotFound
from adapters.names import (
    DEFAULT_ALIAS,
    check_adapter_name,
    check_alias,
    is_digest,
    is_version_number,
)


class VersionState(StrEnum):
    """What the registry says of a version; only ACTIVE ones are routable."""

    STORED = "stored"
    PROBING = "probing"
    ACTIVE = "active"
    FAILED = "failed"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionEntry:
    """One version of an adapter.

    reason          why it failed, else empty
    wants_default   its uploader asked for `default`; it gets it when it becomes active
    """

    number: int
    digest: str
    state: VersionState
    created: str
    reason: str = ""
    wants_default: bool = False

    @property
    def label(self) -> str:
        return f"v{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecord:
    """All versions and aliases of one name; numbers are never used twice.

    aliases       alias -> digest of an active version
    previous      alias -> where it pointed before; what a rollback swaps with
    last_number   the highest number ever given, though its version may be forgotten
    """

    name: str
    base_id: str
    generation: int
    versions: tuple[VersionEntry, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    previous: Mapping[str, str] = field(default_factory=dict)
    last_number: int = 0

    @property
    def is_retired(self) -> bool:
        """Whether the name has been given up: it is kept so that numbers go on."""
        return all(version.state is VersionState.RETIRED for version in self.versions)

    def find(self, digest: str) -> VersionEntry | None:
        return next((entry for entry in self.versions if entry.digest == digest), None)

    def aliases_of(self, digest: str) -> tuple[str, ...]:
        return tuple(sorted(alias for alias, target in self.aliases.items() if target == digest))

    def check_invariants(self) -> None:
        numbers = [entry.number for entry in self.versions]
        assert numbers == sorted(set(numbers)), "version numbers must rise"
        assert max(numbers, default=0) <= self.last_number, "no number may come twice"
        digests = [entry.digest for entry in self.versions]
        assert len(set(digests)) == len(digests), "one content is one version"
        active = {e.digest for e in self.versions if e.state is VersionState.ACTIVE}
        assert set(self.aliases.values()) <= active, "an alias must point at an active version"
        assert set(self.previous.values()) <= active, "a rollback must be possible"
        assert set(self.previous) <= set(self.aliases), "no way back without an alias"
        assert self.generation >= 1
        assert DEFAULT_ALIAS in self.aliases or not active, "an active version, so a default"


def publish(
    record: AdapterRecord | None,
    *,
    name: str,
    base_id: str,
    digest: str,
    created: str,
    promote: bool = False,
    state: VersionState = VersionState.ACTIVE,
) -> AdapterRecord:
    """Add a version, or find it again; the first active one becomes `default`.

    Content that is a version already keeps its number. With promote, `default` moves to it, at once
    or when its probe has made it active.
    """
    if record is None:
        check_adapter_name(name)
        record = AdapterRecord(name=name, base_id=base_id, generation=0, versions=())
    assert record.name == name
    if record.base_id != base_id and not record.is_retired:
        raise AdapterConflict(
            f"{name!r} is an adapter of {record.base_id!r}, so it can't be one of {base_id!r} too"
        )
    entry = record.find(digest)
    if entry is None:
        number = record.last_number + 1
        entry = VersionEntry(number=number, digest=digest, state=state, created=created)
        versions = (*record.versions, entry)
        record = replace(record, last_number=number)
    elif entry.state in {VersionState.RETIRED, VersionState.FAILED}:
        entry = replace(entry, state=state, reason="", wants_default=False, created=created)
        versions = _with(record.versions, entry)
    else:
        versions = record.versions
    if promote and entry.state is not VersionState.ACTIVE:
        entry = replace(entry, wants_default=True)
        versions = _with(versions, entry)
    changed = replace(record, base_id=base_id, versions=versions)
    return _next(record, _settle_default(changed, entry, promote=promote))


def activate(record: AdapterRecord, digest: str, *, promote: bool = False) -> AdapterRecord:
    """Make a version routable after its probe; one that was retired meanwhile stays so."""
    before = _entry(record, digest)
    if before.state is VersionState.RETIRED:
        raise AdapterConflict(f"{record.name}@{before.label} was retired before its probe ended")
    entry = replace(before, state=VersionState.ACTIVE, reason="", wants_default=False)
    changed = replace(record, versions=_with(record.versions, entry))
    return _next(record, _settle_default(changed, entry, promote=promote or before.wants_default))


def fail(record: AdapterRecord, digest: str, *, reason: str) -> AdapterRecord:
    """Mark a version that its probe has refused; an aliased version can't fail."""
    entry = _entry(record, digest)
    _check_not_aliased(record, entry)
    entry = replace(entry, state=VersionState.FAILED, reason=reason, wants_default=False)
    return _next(record, _forget(replace(record, versions=_with(record.versions, entry)), entry))


def promote(record: AdapterRecord, *, alias: str, version_ref: str) -> AdapterRecord:
    """Point an alias at an active version, and remember where it pointed."""
    check_alias(alias)
    entry = resolve(record, version_ref)
    if entry.state is not VersionState.ACTIVE:
        reason = f" ({entry.reason})" if entry.reason else ""
        raise AdapterConflict(
            f"{record.name}@{entry.label} is {entry.state}{reason}; only an active version "
            "can have an alias"
        )
    return _next(record, _point(record, alias, entry.digest))


def rollback(record: AdapterRecord, alias: str = DEFAULT_ALIAS) -> AdapterRecord:
    """Swap an alias with its previous target; twice is where one began."""
    if alias not in record.aliases:
        raise AdapterNotFound(f"{record.name!r} has no alias {alias!r}")
    if alias not in record.previous:
        raise AdapterConflict(
            f"the alias {alias!r} of {record.name!r} has never pointed elsewhere, so there is "
            "nothing to go back to"
        )
    return _next(record, _point(record, alias, record.previous[alias]))


def drop_alias(record: AdapterRecord, alias: str) -> AdapterRecord:
    """Take an alias away; `default` stays as long as the name lives."""
    if alias not in record.aliases:
        raise AdapterNotFound(f"{record.name!r} has no alias {alias!r}")
    if alias == DEFAULT_ALIAS:
        raise AdapterConflict("`default` can be moved, but not removed; remove the adapter instead")
    return _next(
        record,
        replace(
            record,
            aliases=_without(record.aliases, alias),
            previous=_without(record.previous, alias),
        ),
    )


def retire(record: AdapterRecord, version_ref: str | None = None) -> AdapterRecord:
    """Give up one version that no alias names, or without a reference the whole name."""
    if version_ref is None:
        versions = tuple(replace(e, state=VersionState.RETIRED) for e in record.versions)
        return _next(record, replace(record, versions=versions, aliases={}, previous={}))
    entry = resolve(record, version_ref)
    _check_not_aliased(record, entry)
    entry = replace(entry, state=VersionState.RETIRED)
    return _next(record, _forget(replace(record, versions=_with(record.versions, entry)), entry))


def prune(record: AdapterRecord, *, num_kept: int = 8) -> AdapterRecord:
    """Forget all but the newest `num_kept` versions that neither an alias nor a way back names.

    Retired versions are forgotten first; the bytes that no record names may then go too.
    """
    held = {*record.aliases.values(), *record.previous.values()}
    loose = [
        entry
        for entry in record.versions
        if entry.digest not in held and entry.state is not VersionState.RETIRED
    ]
    old = {entry.digest for entry in loose[: max(0, len(loose) - num_kept)]}
    versions = tuple(
        entry
        for entry in record.versions
        if entry.digest not in old and entry.state is not VersionState.RETIRED
    )
    return _next(record, replace(record, versions=versions))


def revive(retired: AdapterRecord, fresh: AdapterRecord) -> AdapterRecord:
    """Continue a name that was given up with a record begun anew, so that no number returns."""
    assert retired.is_retired
    record = retired
    for entry in fresh.versions:
        record = publish(
            record,
            name=fresh.name,
            base_id=fresh.base_id,
            digest=entry.digest,
            created=entry.created,
            state=entry.state,
            promote=entry.wants_default,
        )
    revived = replace(record, aliases=dict(fresh.aliases), previous=dict(fresh.previous))
    return replace(revived, generation=retired.generation + 1)


def resolve(record: AdapterRecord, version_ref: str | None = None) -> VersionEntry:
    """Find the version that a reference names: None, an alias, "v3" or "sha256:…"."""
    ref = DEFAULT_ALIAS if version_ref is None else version_ref
    if is_digest(ref):
        found = [entry for entry in record.versions if entry.digest.startswith(ref)]
    elif is_version_number(ref):
        found = [entry for entry in record.versions if entry.label == ref]
    else:
        target = record.aliases.get(ref)
        found = [entry for entry in record.versions if entry.digest == target]
    found = [entry for entry in found if entry.state is not VersionState.RETIRED]
    if len(found) != 1:
        raise AdapterNotFound(f"{record.name!r} has no version or alias {ref!r}")
    return found[0]


def _next(before: AdapterRecord, after: AdapterRecord) -> AdapterRecord:
    after = replace(after, generation=before.generation)
    return before if after == before else replace(after, generation=before.generation + 1)


def _settle_default(record: AdapterRecord, entry: VersionEntry, *, promote: bool) -> AdapterRecord:
    wanted = promote or DEFAULT_ALIAS not in record.aliases
    if entry.state is not VersionState.ACTIVE or not wanted:
        return record
    return _point(record, DEFAULT_ALIAS, entry.digest)


def _point(record: AdapterRecord, alias: str, digest: str) -> AdapterRecord:
    before = record.aliases.get(alias)
    if before == digest:
        return record
    previous = record.previous if before is None else {**record.previous, alias: before}
    return replace(record, aliases={**record.aliases, alias: digest}, previous=previous)


def _forget(record: AdapterRecord, entry: VersionEntry) -> AdapterRecord:
    previous = {a: digest for a, digest in record.previous.items() if digest != entry.digest}
    return replace(record, previous=previous)


def _entry(record: AdapterRecord, digest: str) -> VersionEntry:
    entry = record.find(digest)
    if entry is None:
        raise AdapterNotFound(f"{record.name!r} has no version {digest!r}")
    return entry


def _check_not_aliased(record: AdapterRecord, entry: VersionEntry) -> None:
    aliases = record.aliases_of(entry.digest)
    if aliases:
        raise AdapterConflict(
            f"{record.name}@{entry.label} is what {', '.join(aliases)} points at; "
            "move the alias first"
        )


def _with(versions: Iterable[VersionEntry], changed: VersionEntry) -> tuple[VersionEntry, ...]:
    return tuple(changed if e.digest == changed.digest else e for e in versions)


def _without(mapping: Mapping[str, str], key: str) -> dict[str, str]:
    return {k: v for k, v in mapping.items() if k != key}
