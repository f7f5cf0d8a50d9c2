"""Names for things of this process, and the time of day for the wire."""

import secrets
from datetime import UTC, datetime


def new_id() -> str:
    """Make a name that no one else has."""
    return secrets.token_hex(12)


def unix_time_s() -> int:
    """Seconds since 1970, for `created` fields only; durations come from monotonic clocks."""
    return int(datetime.now(UTC).timestamp())
