"""How adapters, aliases and models may be spelt, and what a `model` field means."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from adapters.errors import AdapterNameInvalid

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION_NUMBER = re.compile(r"v[0-9]+")
_DIGEST = re.compile(r"sha256:[0-9a-f]{12,64}")

DEFAULT_ALIAS = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelName:
    """A `model` field taken apart.

    base_id        None when only an adapter was named
    adapter_name   None when the base itself was named
    version_ref    what follows `@`: "v3", an alias or "sha256:…"; None means the alias `default`
    """

    base_id: str | None
    adapter_name: str | None = None
    version_ref: str | None = None


def check_adapter_name(name: str) -> str:
    """Return `name`, or raise AdapterNameInvalid saying what a name may look like."""
    if not _NAME.fullmatch(name):
        raise AdapterNameInvalid(
            f"{name[:140]!r} can't be an adapter's name: it takes 1 to 128 letters, digits, "
            "dots, underscores and hyphens, and starts with a letter or a digit"
        )
    return name


def check_alias(alias: str) -> str:
    """Return `alias`, or raise AdapterNameInvalid; `v3` is a version's number, not an alias."""
    if not _NAME.fullmatch(alias):
        raise AdapterNameInvalid(
            f"{alias[:140]!r} can't be an alias: it takes 1 to 128 letters, digits, dots, "
            "underscores and hyphens, and starts with a letter or a digit"
        )
    if is_version_number(alias):
        raise AdapterNameInvalid(
            f"{alias!r} can't be an alias: `v` and digits name a version by its number"
        )
    return alias


def is_version_number(ref: str) -> bool:
    """Tell whether `ref` is `v` and digits: a version's number."""
    return _VERSION_NUMBER.fullmatch(ref) is not None


def is_digest(ref: str) -> bool:
    """Tell whether `ref` is a digest: `sha256:` and the first 12 to all 64 hex digits."""
    return _DIGEST.fullmatch(ref) is not None


def adapter_name_from_lora_name(lora_name: str) -> str:
    """Map a name given to vLLM's endpoints, where `/` is usual, to one that is allowed here."""
    return check_adapter_name(lora_name.strip("/").replace("/", "--"))


def split_model_name(model: str, known_bases: Collection[str]) -> ModelName | None:
    """Take `model` apart by the known bases alone; None when it can't name anything.

    The longest known base that is the whole of it, or is followed by `:`, wins. Whether the
    adapter exists is the registry's to say.
    """
    if model in known_bases:
        return ModelName(base_id=model)
    prefixes = [base for base in known_bases if model.startswith(base + ":")]
    base_id = max(prefixes, key=len, default=None)
    rest = model if base_id is None else model[len(base_id) + 1 :]
    name, at, ref = rest.partition("@")
    if not _NAME.fullmatch(name) or (at and not _is_version_ref(ref)):
        return None
    return ModelName(base_id=base_id, adapter_name=name, version_ref=ref if at else None)


def parse_model_name(
    model: str, known_bases: Collection[str], known_adapters: Mapping[str, str]
) -> ModelName | None:
    """Resolve `model` against the known bases and adapters; None when it is unknown.

    known_adapters maps each adapter's name to its base_id. The result's base_id is always set.
    An adapter of another base than the one named is unknown, never a fall-back.
    """
    split = split_model_name(model, known_bases)
    if split is None or split.adapter_name is None:
        return split
    base_id = known_adapters.get(split.adapter_name)
    if base_id is None or split.base_id not in {None, base_id}:
        return None
    return ModelName(
        base_id=base_id, adapter_name=split.adapter_name, version_ref=split.version_ref
    )


def _is_version_ref(ref: str) -> bool:
    return _NAME.fullmatch(ref) is not None or is_digest(ref)
