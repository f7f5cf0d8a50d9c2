"""What a `model` field means here and now: the base, or one immutable version of an adapter."""

import difflib
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

from adapters.errors import AdapterNotFound
from adapters.manifest import lora_id
from adapters.names import ModelName
from adapters.record import AdapterRecord, VersionState, resolve
from gateway.errors import ModelNotFound

BASE_VERSION = "base"
MAX_NEAR_NAMES = 3
MAX_COMPARED = 200
MAX_COMPARED_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What one request runs on, fixed for its life however often an alias moves meanwhile."""

    public_name: str
    base_id: str
    adapter_name: str | None = None
    digest: str | None = None

    @property
    def lora_id(self) -> str | None:
        """Return what a worker knows the version by, or None for the base."""
        if self.adapter_name is None or self.digest is None:
            return None
        return lora_id(self.adapter_name, self.digest)

    @property
    def worker_model(self) -> str:
        """Return what goes into the worker's `model` field."""
        return self.lora_id or self.base_id

    @property
    def version(self) -> str:
        """Return what the header x-loraplex-version says."""
        return self.digest or BASE_VERSION


def resolve_model(
    model: str,
    *,
    model_name: ModelName | None,
    record: AdapterRecord | None,
    known_names: Callable[[], Iterable[str]],
) -> Target:
    """Return what `model` names, or raise ModelNotFound with names that look like it.

    model_name    `model` taken apart by the known bases; None when it can't name anything
    record        of the adapter in it; None when there is none
    known_names   gives the public names that the caller may see, for the near names
    """
    if model_name is not None and model_name.adapter_name is None:
        assert model_name.base_id is not None
        return Target(public_name=model, base_id=model_name.base_id)
    if model_name is None or record is None or model_name.base_id not in {None, record.base_id}:
        raise _unknown(model, known_names)
    assert record.name == model_name.adapter_name
    try:
        entry = resolve(record, model_name.version_ref)
    except AdapterNotFound as error:
        raise _unknown(model, known_names, reason=str(error)) from None
    if entry.state is not VersionState.ACTIVE:
        raise _unknown(model, known_names, reason=f"{record.name}@{entry.label} is {entry.state}")
    return Target(
        public_name=model, base_id=record.base_id, adapter_name=record.name, digest=entry.digest
    )


def near_names(model: str, known_names: Iterable[str]) -> list[str]:
    """Return the few known names that look most like `model`, which may leave the base out."""
    asked = model[:MAX_COMPARED_CHARS]
    names = {name.rpartition(":")[2] if ":" not in asked else name: name for name in known_names}
    # Comparing is slow; those that begin alike are enough of thousands.
    alike = heapq.nlargest(MAX_COMPARED, names, key=lambda name: _num_shared_chars(name, asked))
    close = difflib.get_close_matches(asked, alike, n=MAX_NEAR_NAMES, cutoff=0.6)
    return [names[name] for name in close]


def _num_shared_chars(name: str, asked: str) -> int:
    """Return how long a beginning the two have in common, whatever the case."""
    pairs = zip(name.lower(), asked.lower(), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _unknown(
    model: str, known_names: Callable[[], Iterable[str]], *, reason: str = ""
) -> ModelNotFound:
    near = near_names(model, known_names())
    hint = f"; did you mean {', '.join(repr(name) for name in near)}?" if near else ""
    because = f": {reason}" if reason else ""
    shown = repr(model[:MAX_COMPARED_CHARS])
    return ModelNotFound(f"the model {shown} does not exist{because}{hint}")
