"""What is known about one stored version: written once, read by everyone."""

from pathlib import Path

import msgspec

from adapters.base_description import OUTSIDE_GROUPS

MANIFEST_NAME = "manifest.json"
DIGEST_PREFIX = "sha256:"


class AdapterManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of one version, kept beside its bytes and in the registry.

    digest                 "sha256:" and 64 hex digits; see adapters.digest
    base_id, base_identity the base against which it was validated
    rows                   rank rows that it needs, by arena group
    num_modules            modules of layers that it touches; targets names those outside too
    num_possible_modules   linear modules of that base's layers, so that coverage can be shown
    warnings               what the uploader should look at; notes: what was accepted, and why
    allows_no_effect       the uploader wants it served though it changes nothing
    created                ISO 8601, UTC
    """

    digest: str
    base_id: str
    base_identity: str
    dtype: str
    max_rank: int
    rows: dict[str, int]
    num_modules: int
    num_possible_modules: int
    targets: list[str]
    num_bytes: int
    created: str
    notes: list[str] = []
    warnings: list[str] = []
    allows_no_effect: bool = False

    @property
    def coverage(self) -> str:
        """How much of the base it touches, for a person."""
        outside = [target for target in self.targets if target in OUTSIDE_GROUPS]
        inside = f"{self.num_modules}/{self.num_possible_modules} modules"
        return " and ".join([inside, *outside])

    def lora_id(self, adapter_name: str) -> str:
        return lora_id(adapter_name, self.digest)


def lora_id(adapter_name: str, digest: str) -> str:
    """Return the name by which a worker knows a version: `name@digest12`."""
    return f"{adapter_name}@{digest.removeprefix(DIGEST_PREFIX)[:12]}"


def allows_no_effect(folder: Path) -> bool:
    """Tell whether a manifest beside an adapter's files says that it may change nothing."""
    try:
        raw = (folder / MANIFEST_NAME).read_bytes()
        return msgspec.json.decode(raw, type=AdapterManifest).allows_no_effect
    except (FileNotFoundError, msgspec.MsgspecError):
        return False
