"""The content-addressed store: one folder per version, named by its digest, never changed."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from adapters.base_description import BaseDescription
from adapters.digest import adapter_digest
from adapters.durable import sync_file, write_atomically
from adapters.errors import AdapterInvalid, AdapterNotFound, StoreBroken
from adapters.journal import Journal
from adapters.manifest import DIGEST_PREFIX, MANIFEST_NAME, AdapterManifest
from adapters.peft_format import CONFIG_NAME
from adapters.validate import Inspection
from adapters.weight_files import weight_files

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class AdapterStore:
    """Keeps the bytes of every version below one root.

        versions/<64 hex>/   adapter_config.json, the weights as they came, manifest.json
        staging/<random>/    uploads on their way; emptied when a store is opened by its owner
        journal.jsonl        what was published and promoted

    Several processes may read and put at once; equal content meets at the rename.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._versions = root / "versions"
        self._staging = root / "staging"
        for folder in (self._versions, self._staging):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def root(self) -> Path:
        return self._root

    def journal(self) -> Journal:
        """Return the journal of this store."""
        return Journal(self._root / "journal.jsonl")

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Lend an empty private folder; whatever is left in it goes when the block ends."""
        folder = Path(tempfile.mkdtemp(dir=self._staging))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def clean_staging(self) -> int:
        """Remove what a crash has left behind; only for the process that owns the store."""
        leftovers = list(self._staging.iterdir())
        for folder in leftovers:
            shutil.rmtree(folder, ignore_errors=True)
        return len(leftovers)

    def put(
        self,
        staged: Path,
        inspection: Inspection,
        base: BaseDescription,
        *,
        allows_no_effect: bool = False,
    ) -> AdapterManifest:
        """Keep an inspected folder for good and return its manifest.

        Content that is here already is not kept twice. Raises AdapterInvalid when the inspection
        found problems. `staged` must lie in a folder lent by staging(); its files are moved.
        """
        adapter = inspection.adapter
        if adapter is None:
            raise AdapterInvalid(inspection.problems)
        digest = adapter_digest(adapter)
        if self.has(digest):
            manifest = self.manifest(digest)
            is_same_base = (manifest.base_id, manifest.base_identity) == (
                base.base_id,
                base.identity,
            )
            if is_same_base and (manifest.allows_no_effect or not allows_no_effect):
                return manifest
        manifest = AdapterManifest(
            digest=digest,
            base_id=base.base_id,
            base_identity=base.identity,
            dtype=adapter.dtype,
            max_rank=adapter.max_rank,
            rows=adapter.rows(),
            num_modules=adapter.num_layer_modules,
            num_possible_modules=base.num_layers * len(base.modules),
            targets=list(adapter.targets),
            num_bytes=adapter.num_bytes,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            notes=list(inspection.notes),
            warnings=list(inspection.warnings),
            allows_no_effect=allows_no_effect,
        )
        self._keep(staged, manifest)
        return manifest

    def has(self, digest: str) -> bool:
        return (self.path_of(digest) / MANIFEST_NAME).is_file()

    def path_of(self, digest: str) -> Path:
        """Return the folder of a version, whether or not it is here."""
        if not _DIGEST.fullmatch(digest):
            raise AdapterNotFound(f"{digest[:80]!r} isn't a full digest")
        return self._versions / digest.removeprefix(DIGEST_PREFIX)

    def manifest(self, digest: str) -> AdapterManifest:
        """Read the manifest of a version that is here."""
        path = self.path_of(digest) / MANIFEST_NAME
        try:
            return msgspec.json.decode(path.read_bytes(), type=AdapterManifest)
        except FileNotFoundError as error:
            raise AdapterNotFound(f"the store has no version {digest}") from error
        except (OSError, msgspec.MsgspecError) as error:
            raise StoreBroken(f"the manifest of {digest} can't be read: {error}") from error

    def digests(self) -> tuple[str, ...]:
        """List every version that is here."""
        names = sorted(path.name for path in self._versions.iterdir())
        found = (DIGEST_PREFIX + name for name in names)
        return tuple(d for d in found if _DIGEST.fullmatch(d) and self.has(d))

    def remove(self, digest: str) -> None:
        """Give the bytes of a version back to the disk; removing what isn't here is fine."""
        grave = self.set_aside(digest)
        if grave is not None:
            self.throw_away(grave)

    def set_aside(self, digest: str) -> Path | None:
        """Take a version out of sight for a moment; None if it isn't here.

        The caller gives the place to put_back() or to throw_away(). What a crash leaves is staging.
        """
        grave = Path(tempfile.mkdtemp(dir=self._staging)) / "version"
        try:
            self.path_of(digest).rename(grave)
        except FileNotFoundError:
            grave.parent.rmdir()
            return None
        sync_file(self._versions)
        return grave

    def put_back(self, grave: Path, digest: str) -> None:
        """Undo set_aside(), unless the same content has been put again meanwhile."""
        with suppress(OSError):
            grave.rename(self.path_of(digest))
            sync_file(self._versions)
        self.throw_away(grave)

    def throw_away(self, grave: Path) -> None:
        """End what set_aside() began."""
        shutil.rmtree(grave.parent, ignore_errors=True)

    def check_invariants(self) -> None:
        for digest in self.digests():
            assert self.manifest(digest).digest == digest
            folder = self.path_of(digest)
            assert (folder / CONFIG_NAME).is_file(), f"{digest} lacks {CONFIG_NAME}"
            assert weight_files(folder), f"{digest} lacks its weights"

    def _keep(self, staged: Path, manifest: AdapterManifest) -> None:
        target = self.path_of(manifest.digest)
        raw = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        if target.exists():
            write_atomically(target / MANIFEST_NAME, raw)
            return
        with self.staging() as folder:
            ready = folder / "version"
            ready.mkdir()
            for name in (CONFIG_NAME, *(file.name for file in weight_files(staged))):
                (staged / name).replace(ready / name)
                (ready / name).chmod(0o444)
                sync_file(ready / name)
            write_atomically(ready / MANIFEST_NAME, raw)
            try:
                ready.rename(target)
            except OSError:
                if not self.has(manifest.digest):
                    raise
                # Another process kept the same content a moment ago.
            sync_file(self._versions)
