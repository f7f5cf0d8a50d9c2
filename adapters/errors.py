"""What can go wrong with an adapter, by who must act.

AdapterError
├── AdapterInvalid        the uploader: every problem is listed
├── AdapterNameInvalid    the caller: a name, alias or reference can't be spelt so
├── AdapterTooLarge       the uploader: a limit is named with both numbers
├── AdapterNotFound       the caller's view is old
├── AdapterConflict       the caller's view is old: a generation, name or alias doesn't fit
├── StoreBroken           the operator: the store's files can't be read or written
└── RegistryBroken        the operator: Redis can't be reached or answers nonsense
"""

from collections.abc import Sequence


class AdapterError(Exception):
    """Base of every error that this package raises on purpose; `code` goes on the wire."""

    code = "adapter_error"


class AdapterInvalid(AdapterError):
    """The files can't be applied exactly; `problems` lists every reason in words."""

    code = "invalid_adapter"

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class AdapterNameInvalid(AdapterError):
    """A name or an alias has a form that isn't allowed."""

    code = "invalid_name"


class AdapterTooLarge(AdapterError):
    """An upload passes a limit of bytes, members or ratio."""

    code = "adapter_too_large"


class AdapterNotFound(AdapterError):
    """No adapter, version or alias of that name."""

    code = "adapter_not_found"


class AdapterConflict(AdapterError):
    """The record has moved on since the caller read it, or the change isn't possible."""

    code = "conflict"


class StoreBroken(AdapterError):
    """The store's files can't be read, written or trusted."""

    code = "store_unavailable"


class RegistryBroken(AdapterError):
    """The registry can't be reached."""

    code = "registry_unavailable"
