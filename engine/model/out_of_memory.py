"""What is said when a device has too little memory: for what, how much, and what to lower."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.errors import InvalidModel

_MIB = 1 << 20
_ASKED_FOR = re.compile(r"Tried to allocate ([\d.]+ \w+)")


@contextmanager
def allocating(
    what: str, *, device: torch.device, remedy: str, num_bytes: int | None = None
) -> Iterator[None]:
    """Run what allocates `what`; raises InvalidModel in words when the device's memory runs out.

    remedy      what the operator can do about it
    num_bytes   of all of `what`, where that is known before
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        size = "" if num_bytes is None else f" ({num_bytes // _MIB} MiB)"
        words = describe_shortage(error, device)
        raise InvalidModel(f"no room for {what}{size}: {words}; {remedy}") from error


def describe_shortage(error: torch.OutOfMemoryError, device: torch.device) -> str:
    """Say what was asked of `device` in the end, and what it has; one line, no full stop."""
    asked_for = _ASKED_FOR.search(str(error))
    words = f"{device} ran out of memory"
    if asked_for is not None:
        words += f" when {asked_for[1]} were asked for"
    if device.type == "cuda":
        num_free_bytes, num_bytes = torch.cuda.mem_get_info(device)
        words += f"; {num_free_bytes // _MIB} of {num_bytes // _MIB} MiB are free"
    return words
