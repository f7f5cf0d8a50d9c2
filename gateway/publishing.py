"""Changes of adapters: from staged files to a routable version, and every move after that."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from anyio import CapacityLimiter, to_thread

from adapters.base_description import BaseDescription
from adapters.errors import AdapterConflict, AdapterNotFound
from adapters.manifest import AdapterManifest
from adapters.names import DEFAULT_ALIAS, check_alias
from adapters.record import AdapterRecord, VersionEntry, VersionState, promote, publish, rollback
from adapters.registry import AdapterRegistry
from adapters.store import AdapterStore
from adapters.validate import inspect_directory
from gateway.admin_types import AdapterView, UploadView, adapter_view
from gateway.errors import InvalidRequest, ModelNotFound, WorkerUnavailable
from gateway.parsing import blaming
from gateway.probing import AdapterHasNoEffect, VersionProber
from gateway.registry_reader import RegistryReader
from gateway.uploads import StagedUpload

ACTOR = "admin"
# The others wait, so that streams of other people keep their share of the machine.
MAX_INSPECTED_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What an upload has become; is_new is False when the content was a version already.

    is_waiting   no worker could probe it yet, so it isn't routable
    """

    view: UploadView
    is_new: bool
    is_waiting: bool


class Publisher:
    """The gateway's only writer of the store and of adapter records.

    Order of an upload: blob, manifest, journal, pointer, probe. What fails on the way leaves no
    name that points at it; a blob without a pointer is harmless, and found again by the next equal
    upload.
    """

    def __init__(
        self,
        *,
        store: AdapterStore,
        registry: AdapterRegistry,
        reader: RegistryReader,
        prober: VersionProber,
    ) -> None:
        self.store = store
        self._registry = registry
        self._reader = reader
        self._prober = prober
        self._threads = CapacityLimiter(MAX_INSPECTED_AT_ONCE)

    async def publish(self, upload: StagedUpload) -> Published:
        """Validate, keep, register and probe what was staged. Raises AdapterError or GatewayError.

        A version whose probe fails stays in its record as failed, with the reason.
        """
        name = upload.name
        base = await self._base(upload.base)
        existing = await self._registry.get(name)
        if existing is not None and existing.base_id != base.base_id:
            raise AdapterConflict(
                f"{name!r} is an adapter of {existing.base_id!r}, "
                f"so it can't be one of {base.base_id!r} too"
            )
        keep = partial(self._keep, upload, base)
        manifest = await to_thread.run_sync(keep, limiter=self._threads)
        seen: list[AdapterRecord | None] = []

        def add(record: AdapterRecord | None) -> AdapterRecord:
            seen.append(record)
            return publish(
                record,
                name=name,
                base_id=base.base_id,
                digest=manifest.digest,
                created=manifest.created,
                promote=upload.promote,
                state=VersionState.PROBING,
            )

        record = await self._registry.update(name, add, manifest, actor=ACTOR, action="publish")
        self._reader.learn(record)
        if not await to_thread.run_sync(self.store.has, manifest.digest):
            # The same content was pruned under another name, between our keeping and our naming it.
            await to_thread.run_sync(keep, limiter=self._threads)
        before = seen[-1]
        is_new = before is None or not _is_live(before.find(manifest.digest))
        await self._reader.renew_workers()
        record = await self._prober.settle(name, manifest.digest)
        view = _upload_view(record, manifest, upload)
        return Published(
            view=view, is_new=is_new, is_waiting=view.state == VersionState.PROBING.value
        )

    async def promote(
        self, name: str, *, alias: str, version_ref: str, if_generation: int | None
    ) -> AdapterView:
        """Point an alias at a version; AdapterConflict if the generation isn't the one wanted."""
        with blaming("alias"):
            check_alias(alias)

        def move(record: AdapterRecord) -> AdapterRecord:
            if if_generation is not None and record.generation != if_generation:
                raise AdapterConflict(
                    f"{name!r} is at generation {record.generation}, not {if_generation}"
                )
            return promote(record, alias=alias, version_ref=version_ref)

        return await self._change(name, move, action=f"promote {alias}")

    async def roll_back(self, name: str, *, alias: str = DEFAULT_ALIAS) -> AdapterView:
        """Swap an alias with its previous version."""
        return await self._change(name, partial(rollback, alias=alias), action=f"rollback {alias}")

    async def retire(self, name: str) -> tuple[str, ...]:
        """Give the name up, and return the digests of its versions."""
        removed = await self._registry.remove(name, actor=ACTOR)
        self._reader.forget(name)
        return tuple(entry.digest for entry in removed.versions)

    async def has_name(self, name: str) -> bool:
        """Tell whether a living adapter has that name."""
        return await self._registry.get(name) is not None

    async def view(self, name: str) -> AdapterView:
        """Return one adapter, or raise AdapterNotFound."""
        record = await self._registry.get(name)
        if record is None:
            raise AdapterNotFound(f"there is no adapter {name[:140]!r}")
        return await self._view(record)

    async def all_views(self) -> list[AdapterView]:
        """Return all living adapters by name."""
        records = await self._registry.list()
        digests = [entry.digest for record in records for entry in record.versions]
        manifests = await self._registry.manifests(digests)
        return [adapter_view(record, manifests) for record in records]

    async def _change(
        self, name: str, change: Callable[[AdapterRecord], AdapterRecord], *, action: str
    ) -> AdapterView:
        def change_living(record: AdapterRecord | None) -> AdapterRecord:
            if record is None:
                raise AdapterNotFound(f"there is no adapter {name[:140]!r}")
            return change(record)

        record = await self._registry.update(name, change_living, actor=ACTOR, action=action)
        self._reader.learn(record)
        return await self._view(record)

    async def _view(self, record: AdapterRecord) -> AdapterView:
        manifests = await self._registry.manifests([entry.digest for entry in record.versions])
        return adapter_view(record, manifests)

    async def _base(self, base_id: str | None) -> BaseDescription:
        """Return the named base, or the only one there is."""
        bases = await self._registry.bases()
        if not bases:
            raise WorkerUnavailable(
                "no base is known yet, since no worker has ever been up; try again in a moment"
            )
        if base_id is None:
            if len(bases) > 1:
                raise InvalidRequest(
                    f"`base` is needed, since there are several: {', '.join(sorted(bases))}",
                    param="base",
                    code="missing_field",
                )
            return next(iter(bases.values()))
        if base_id not in bases:
            raise ModelNotFound(
                f"there is no base {base_id[:300]!r}; there is {', '.join(sorted(bases))}",
                param="base",
            )
        return bases[base_id]

    def _keep(self, upload: StagedUpload, base: BaseDescription) -> AdapterManifest:
        inspection = inspect_directory(
            upload.directory, base, allow_no_effect=upload.allow_no_effect
        )
        if inspection.has_no_effect:
            raise AdapterHasNoEffect(inspection.problems)
        return self.store.put(
            upload.directory, inspection, base, allows_no_effect=upload.allow_no_effect
        )


def _is_live(entry: VersionEntry | None) -> bool:
    return entry is not None and entry.state is not VersionState.RETIRED


def _upload_view(
    record: AdapterRecord, manifest: AdapterManifest, upload: StagedUpload
) -> UploadView:
    entry = record.find(manifest.digest)
    assert entry is not None
    return UploadView(
        name=record.name,
        base=record.base_id,
        version=entry.label,
        digest=entry.digest,
        lora_id=manifest.lora_id(record.name),
        state=entry.state.value,
        generation=record.generation,
        aliases=dict(record.aliases),
        coverage=manifest.coverage,
        max_rank=manifest.max_rank,
        targets=manifest.targets,
        num_bytes=manifest.num_bytes,
        warnings=manifest.warnings,
        notes=manifest.notes,
        skipped=list(upload.report.skipped),
    )
