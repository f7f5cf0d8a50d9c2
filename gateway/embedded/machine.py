"""What this machine has to give."""

from pathlib import Path

# The engine's own choice for one worker: at most this, at most half of what is available.
MAX_MEASURED_BYTES = 4 << 30


def available_memory_bytes() -> int | None:
    """Memory that programs can still get; None where the system doesn't say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def memory_share_bytes(num_workers: int) -> int | None:
    """What each of several workers may take, so that together they take half; None for one.

    One worker measures for itself. Several that did so at once would each take half.
    """
    available = available_memory_bytes()
    if num_workers == 1 or available is None:
        return None
    return min(MAX_MEASURED_BYTES, available // (2 * num_workers))
