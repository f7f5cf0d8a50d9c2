"""What `serve` tells while it starts and runs; one JSON object a line with `--json`."""

from typing import Any

import msgspec


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="progress"):
    """One start-up step in words. `step` is registry, gateway, adapter or a worker's name."""

    step: str
    text: str


class Settings(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="settings"):
    """What this run was told, by flag name; `sources` says default, option or environment."""

    values: dict[str, str]
    sources: dict[str, str]


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="worker"):
    """A worker serves; `details` is its own ready message."""

    name: str
    pid: int
    details: dict[str, Any]


class ChildEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="ended"):
    """A child ended although nobody asked it to; it is started again after `retry_in_s`."""

    name: str
    reason: str
    retry_in_s: float


class ChildRestarted(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="restarted"):
    """The child serves again, `after_s` seconds after it ended."""

    name: str
    pid: int
    after_s: float


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="ready"):
    """Everything serves. `pids` has gateway, valkey (None with --redis-url) and workers."""

    url: str
    models: list[str]
    pids: dict[str, Any]
    redis_url: str
    state_dir: str
    start_s: float


class Stopping(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="stopping"):
    """New requests are refused, running ones are finished."""

    text: str


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="stopped"):
    """Every process of this run has ended."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="failed"):
    """This run ends with exit code 1; one line that says what to do."""

    message: str


Event = (
    Progress
    | Settings
    | WorkerReady
    | ChildEnded
    | ChildRestarted
    | Ready
    | Stopping
    | Stopped
    | Failed
)
