"""What a worker's server is told at start."""

import ipaddress
import os

import msgspec

from engine.config import EngineConfig

# What is secret never stands on a command line, where every user of the machine can read it.
TOKEN_VARIABLE = "LORAPLEX_CLUSTER_TOKEN"  # noqa: S105  the variable's name, not a token
REDIS_VARIABLE = "LORAPLEX_REDIS_URL"


class InvalidSettings(Exception):
    """The worker can't be started like this; the message says what to change."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one worker. Travels as JSON on the server's command line.

    port                 0 lets the system choose; the `ready` line has the address
    redis_url            where heartbeats go; None means nowhere. It may hold a password: it comes
                         from the environment
    allowed_roots        directories below which `load_lora_adapter` may read; none by default
    advertised_address   the URL in heartbeats; None means the one that is bound
    cluster_token        from the environment, too
    """

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 0
    worker_id: str = "w-local"
    redis_url: str | None = None
    allowed_roots: tuple[str, ...] = ()
    advertised_address: str | None = None
    cluster_token: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, not {self.port}")
        if not self.worker_id:
            raise ValueError("worker_id must not be empty")


def read_settings(text: str) -> WorkerSettings:
    """Decode the command line's JSON, and take from the environment what is secret."""
    try:
        settings = msgspec.json.decode(text, type=WorkerSettings)
    except msgspec.DecodeError as problem:
        raise InvalidSettings(f"--config can't be read: {problem}") from problem
    if settings.cluster_token is not None:
        raise InvalidSettings(f"the cluster token belongs into {TOKEN_VARIABLE}, not into --config")
    if settings.redis_url is not None:
        raise InvalidSettings(
            f"the registry's URL belongs into {REDIS_VARIABLE}, not into --config"
        )
    settings = msgspec.structs.replace(
        settings,
        cluster_token=os.environ.get(TOKEN_VARIABLE) or None,
        redis_url=os.environ.get(REDIS_VARIABLE) or None,
    )
    if settings.cluster_token is None and not is_loopback(settings.host):
        raise InvalidSettings(
            f"refusing to listen on {settings.host} without {TOKEN_VARIABLE}: "
            "anyone who reaches the port could use the worker"
        )
    return settings


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
