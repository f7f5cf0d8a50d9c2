"""The bodies of the admin routes: what they take and what they answer."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from adapters.manifest import AdapterManifest, lora_id
from adapters.record import AdapterRecord, VersionEntry

Text = Annotated[str, Meta(min_length=1)]


class UploadForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parts of a multipart upload; `files` is one archive or the files themselves.

    allow_no_effect   serve it even if it changes nothing that the base says
    """

    name: Text
    files: list[Annotated[bytes, Meta(extra_json_schema={"format": "binary"})]]
    base: Text | None = None
    promote: bool = False
    allow_no_effect: bool = False


class PathUpload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An upload from a directory or archive that the gateway can read, below an allowed root."""

    name: Text
    path: Text
    base: Text | None = None
    promote: bool = False
    allow_no_effect: bool = False


class AliasMove(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an alias shall point: "v2", "sha256:…" or another alias."""

    version: Text


class RollbackRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which alias goes back to its previous version."""

    alias: Text = "default"


class LoadLoraRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's load call; `lora_path` lies below an allowed root."""

    lora_name: Text
    lora_path: Text
    load_inplace: bool = False


class UnloadLoraRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's unload call."""

    lora_name: Text


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    """One version of an adapter; what its manifest says, as far as it is known."""

    version: str
    digest: str
    lora_id: str
    state: str
    created: str
    reason: str = ""
    coverage: str | None = None
    max_rank: int | None = None
    targets: list[str] = []
    num_bytes: int | None = None
    warnings: list[str] = []
    notes: list[str] = []
    aliases: list[str] = []


class AliasView(msgspec.Struct, frozen=True, kw_only=True):
    """Where an alias points."""

    version: str
    digest: str


class AdapterView(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter's name with all its versions and aliases."""

    name: str
    base: str
    generation: int
    aliases: dict[str, AliasView]
    versions: list[VersionView]


class AdapterList(msgspec.Struct, frozen=True, kw_only=True):
    """All adapters."""

    data: list[AdapterView]
    object: Literal["list"] = "list"


class UploadView(msgspec.Struct, frozen=True, kw_only=True):
    """What an upload has become."""

    name: str
    base: str
    version: str
    digest: str
    lora_id: str
    state: str
    generation: int
    aliases: dict[str, str]
    coverage: str
    max_rank: int
    targets: list[str]
    num_bytes: int
    warnings: list[str]
    notes: list[str]
    skipped: list[str]


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """The name is gone; workers forget its versions in the background."""

    name: str
    deleted: bool = True


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as its heartbeat describes it.

    state     "ready", or "suspect" when the last call to it failed
    status    what its engine core says right now; null when it doesn't answer
    """

    worker_id: str
    kind: str
    address: str
    base_id: str
    base_identity: str
    instance: str
    state: str
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    resident: list[str]
    disk: list[str]
    status: dict[str, Any] | None


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    """All workers that are there."""

    data: list[WorkerInfo]
    object: Literal["list"] = "list"


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One name for `model`; an adapter's parent is its base, its root the default version."""

    id: str
    root: str
    parent: str | None = None
    created: int = 0
    object: Literal["model"] = "model"
    owned_by: str = "loraplex"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All names for `model`, the bases first."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """status is "ok" or "no_worker", registry "ok" or "unreachable"."""

    status: str
    registry: str
    workers: int


def adapter_view(record: AdapterRecord, manifests: dict[str, AdapterManifest]) -> AdapterView:
    """Return the public form of a record; a version without a known manifest shows what it has."""
    labels = {entry.digest: entry.label for entry in record.versions}
    return AdapterView(
        name=record.name,
        base=record.base_id,
        generation=record.generation,
        aliases={
            alias: AliasView(version=labels[digest], digest=digest)
            for alias, digest in sorted(record.aliases.items())
        },
        versions=[_version_view(record, e, manifests.get(e.digest)) for e in record.versions],
    )


def _version_view(
    record: AdapterRecord, entry: VersionEntry, manifest: AdapterManifest | None
) -> VersionView:
    return VersionView(
        version=entry.label,
        digest=entry.digest,
        lora_id=lora_id(record.name, entry.digest),
        state=entry.state.value,
        created=entry.created,
        reason=entry.reason,
        aliases=list(record.aliases_of(entry.digest)),
        coverage=manifest.coverage if manifest else None,
        max_rank=manifest.max_rank if manifest else None,
        targets=manifest.targets if manifest else [],
        num_bytes=manifest.num_bytes if manifest else None,
        warnings=manifest.warnings if manifest else [],
        notes=manifest.notes if manifest else [],
    )
