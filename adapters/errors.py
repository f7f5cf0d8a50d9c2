"""What can go wrong with an adapter, by who must act.

AdapterError
├── AdapterInvalid    the uploader: every problem is listed
├── AdapterTooLarge   the uploader: a limit is named with both numbers
├── AdapterNotFound   the caller's view is old
├── AdapterConflict   the caller's view is old: a generation, name or alias doesn't fit
└── RegistryBroken    the operator: Redis can't be reached or answers nonsense
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


class AdapterTooLarge(AdapterError):
    """An upload passes a limit of bytes, members or ratio."""

    code = "adapter_too_large"


class AdapterNotFound(AdapterError):
    """No adapter, version or alias of that name."""

    code = "adapter_not_found"


class AdapterConflict(AdapterError):
    """The record has moved on since the caller read it, or the change isn't possible."""

    code = "conflict"


class RegistryBroken(AdapterError):
    """The registry can't be reached."""

    code = "registry_unavailable"
