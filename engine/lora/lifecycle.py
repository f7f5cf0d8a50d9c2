"""Brings adapters from a directory to the arena: files, image, rows; never in a step's way."""

import logging
from pathlib import Path
from typing import Protocol

from adapters.base_description import BaseDescription
from engine.errors import AdapterConflict, AdapterRefused, EngineError
from engine.lora.arena_image import ImageBroken
from engine.lora.loader import LoadBroken, LoadDone, LoaderClient, LoadRefused
from engine.lora.residency import AdapterResidency, PendingLoad
from engine.protocol import CallDone, CallFailed, Event, LoadAdapter

logger = logging.getLogger("loraplex.lora")

COPY_BYTES_PER_STEP = 8 * 1024**2


class RowWriter(Protocol):
    """Fills arena rows from an image, a bounded number of bytes at a time."""

    def begin(self, load: PendingLoad) -> None:
        """Make room for `load`; raises ImageBroken if there is nothing fit to copy."""
        ...

    def copy_some(self, max_bytes: int) -> bool:
        """Copy at most about `max_bytes`; return whether the load is complete."""
        ...


class AdapterLifecycle:
    """Owns the loader process and the copy in progress; tells residency what has come true.

    One image build per lora_id at a time, however many calls ask for it; one copy at a time.
    """

    def __init__(
        self,
        *,
        residency: AdapterResidency,
        loader: LoaderClient,
        writer: RowWriter,
        base: BaseDescription,
        dtype: str,
        image_dir: Path,
    ) -> None:
        self.residency = residency
        self._loader = loader
        self._writer = writer
        self._base = base
        self._dtype = dtype
        self._image_dir = image_dir
        self._waiting_calls: dict[str, list[LoadAdapter]] = {}
        self._paths: dict[str, str] = {}
        self._copying: PendingLoad | None = None
        self._failures: dict[str, str] = {}

    @property
    def is_copying(self) -> bool:
        """Whether rows are being filled, which each step brings on."""
        return self._copying is not None

    @property
    def is_busy(self) -> bool:
        """Whether a load is anywhere on its way."""
        return bool(self._waiting_calls) or self._copying is not None

    def is_laying_out(self, lora_id: str) -> bool:
        """Whether an image of `lora_id` is being built: it is about to be known."""
        return lora_id in self._waiting_calls

    def load(self, call: LoadAdapter) -> list[Event]:
        """Begin to lay `call.path` out as an image, or join the build that is under way."""
        self.forget_gone()
        known_path = self._paths.get(call.lora_id)
        if known_path is not None and known_path != call.path:
            message = f"{call.lora_id!r} is loaded from other files; unload it first"
            return [call_failed(call.call_id, AdapterConflict(message))]
        if self.residency.knows(call.lora_id):
            return [CallDone(call_id=call.call_id)]
        if self.residency.is_draining(call.lora_id):
            message = f"{call.lora_id!r} is being unloaded"
            return [call_failed(call.call_id, AdapterConflict(message))]
        waiting = self._waiting_calls.setdefault(call.lora_id, [])
        waiting.append(call)
        if len(waiting) == 1:
            self._paths[call.lora_id] = call.path
            self._loader.submit(
                call.lora_id,
                directory=Path(call.path),
                image_dir=self._image_dir,
                base=self._base,
                dtype=self._dtype,
            )
        return []

    def advance(self, max_bytes: int = COPY_BYTES_PER_STEP) -> list[Event]:
        """Take finished images, and copy at most `max_bytes` of one into its rows."""
        self.forget_gone()
        events: list[Event] = []
        for result in self._loader.poll():
            events += self._take(result)
        if self._copying is None:
            self._begin_copy()
        if self._copying is not None and self._writer.copy_some(max_bytes):
            self.residency.loaded(self._copying.lora_id)
            self._copying = None
        return events

    def forget_gone(self) -> None:
        """Delete the images of versions that nobody holds any more, and free their names."""
        for gone in self.residency.take_gone():
            self._paths.pop(gone.lora_id, None)
            gone.image.unlink(missing_ok=True)

    def take_failures(self) -> dict[str, str]:
        """Return the versions whose load has failed since the last call, and why.

        The caller ends the sequences that wait for them.
        """
        failures, self._failures = self._failures, {}
        return failures

    def check_invariants(self) -> None:
        """Check residency, and that every known version has a path."""
        self.residency.check_invariants()
        for status in self.residency.statuses():
            assert status.lora_id in self._paths, f"{status.lora_id} has no path"

    def close(self) -> None:
        """End the loader process."""
        self._loader.close()

    def _begin_copy(self) -> None:
        load = self.residency.next_load()
        if load is None:
            return
        try:
            self._writer.begin(load)
        except ImageBroken as error:
            logger.warning("the image of %s is broken: %s", load.lora_id, error)
            self._failures[load.lora_id] = str(error)
            self.residency.load_failed(load.lora_id, str(error))
        else:
            self._copying = load

    def _take(self, result: LoadDone | LoadRefused | LoadBroken) -> list[Event]:
        calls = self._waiting_calls.pop(result.lora_id, [])
        error: EngineError
        match result:
            case LoadDone():
                try:
                    self.residency.add(
                        result.lora_id,
                        content_digest=result.content_digest,
                        image=result.image,
                        num_rows=result.num_rows,
                        max_rank=result.max_rank,
                    )
                except AdapterRefused as refused:
                    result.image.unlink(missing_ok=True)
                    error = refused
                else:
                    return [CallDone(call_id=call.call_id) for call in calls]
            case LoadRefused():
                error = AdapterRefused(result.problems)
            case LoadBroken():
                error = EngineError(result.message)
        self._paths.pop(result.lora_id, None)
        return [call_failed(call.call_id, error) for call in calls]


def call_failed(call_id: str, error: EngineError) -> CallFailed:
    """Answer a call with an error of ours."""
    problems = list(error.problems) if isinstance(error, AdapterRefused) else []
    return CallFailed(
        call_id=call_id,
        code=error.code,
        message=str(error),
        status=error.status,
        problems=problems,
    )
