"""What a gateway is told at start; every field has one meaning and one unit."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The settings of one gateway process. The CLI makes them from flags and LORAPLEX_*.

    redis_url            unix:///…/valkey.sock, redis://… or rediss://…
    store_dir            where adapter versions and the journal are kept
    api_key              opens the inference routes; None leaves them open
    admin_key            opens everything; None leaves the admin routes as open as the rest
    allowed_roots        directories from which a JSON upload may read
    max_upload_bytes     of one upload as it comes over the wire, and of what it unpacks to
    max_body_bytes       of any other request body
    upload_silence_s     how long an upload may send nothing before it is given up
    upload_timeout_s     how long an upload may take to come in
    cluster_token        what workers want to see, and sign their heartbeats with; None for neither
    snapshot_interval_s  how often the local copy of registry and workers is renewed
    worker_wait_s        how long a request waits for a worker when there is none
    worker_silence_s     how long a worker may send nothing at all before a request is given up
    load_timeout_s       how long a worker may take to load one version
    """

    redis_url: str = field(repr=False)
    store_dir: Path
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    allowed_roots: tuple[Path, ...] = ()
    max_upload_bytes: int = 2 * 1024**3
    max_body_bytes: int = 32 * 1024**2
    upload_silence_s: float = 30.0
    upload_timeout_s: float = 3600.0
    cluster_token: str | None = field(default=None, repr=False)
    snapshot_interval_s: float = 1.0
    worker_wait_s: float = 5.0
    worker_silence_s: float = 300.0
    load_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("max_upload_bytes", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in (
            "upload_silence_s",
            "upload_timeout_s",
            "snapshot_interval_s",
            "worker_silence_s",
            "load_timeout_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
