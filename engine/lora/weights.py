"""Copies adapters from their images into the arena, a bounded number of bytes at a time."""

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.lora.arena_image import ArenaImage, ImageBroken, ImageSlice, read_image
from engine.lora.residency import PendingLoad
from punica_kernels.arena import Arena, Span

IMAGE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(slots=True, kw_only=True)
class _Copy:
    """One load under way: the first `num_rows_done` rows of remaining[0] are in the arena."""

    load: PendingLoad
    image: ArenaImage
    remaining: deque[ImageSlice]
    num_rows_done: int = 0


class RowCopies(Protocol):
    """How rows get to their places while steps go on; what is copied stays as it is until then."""

    def follow_steps(self) -> None:
        """Let the copies to come begin after all that steps have been given to do so far."""

    def copy(self, place: Tensor, rows: Tensor) -> None:
        """Copy `rows`, which lie in host memory, to `place`; may return before it is done."""

    def precede_steps(self) -> None:
        """Let the steps to come begin after all copies so far."""


class DirectCopies:
    """Copies at once: for arenas in host memory, where nothing runs beside."""

    def follow_steps(self) -> None:
        """Nothing runs that could be waited for."""

    def copy(self, place: Tensor, rows: Tensor) -> None:
        """Copy now."""
        place.copy_(rows)

    def precede_steps(self) -> None:
        """All copies are done."""


class SideStreamCopies:
    """Copies to a CUDA device on a stream of its own; neither host nor steps wait meanwhile.

    Rows go through pinned memory, which torch's allocator takes back when their copy is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow_steps(self) -> None:
        """Order the stream behind the steps' own."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, place: Tensor, rows: Tensor) -> None:
        """Pin `rows` and queue their copy."""
        pinned = rows.pin_memory()
        with torch.cuda.stream(self._stream):
            place.copy_(pinned, non_blocking=True)

    def precede_steps(self) -> None:
        """Order the steps' stream behind this one: by an event on the device, not by the host."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def copies_to(device: torch.device) -> RowCopies:
    """Return how rows get to `device`."""
    return SideStreamCopies(device) if device.type == "cuda" else DirectCopies()


class ArenaWriter:
    """Fills one adapter's rows at a time; the only writer of the arena. Works between steps.

    begin() carries out the evictions and moves that make room. The adapter's tables are set when
    its last row is there, or will be before any step that comes: nothing half loaded can run.
    """

    def __init__(self, arena: Arena, copies: RowCopies | None = None) -> None:
        """`copies` None means those that suit the arena's device."""
        self._arena = arena
        self._copies = copies_to(arena.device) if copies is None else copies
        self._copy: _Copy | None = None

    def begin(self, load: PendingLoad) -> None:
        """Make room as `load` says, and open its image.

        Raises ImageBroken if the image is missing or doesn't fit this arena: the room has been made
        all the same, and nothing is under way.
        """
        assert self._copy is None, "one load at a time"
        self._copies.precede_steps()  # what was cancelled may still be on its way into rows
        for lora_index in load.evicted:
            self._arena.clear_adapter(lora_index)
        for step in load.moves:
            src = Span(row0=step.move.src_row0, num_rows=step.move.num_rows)
            self._arena.move(step.group, src, step.move.dst_row0)
        self._copies.follow_steps()  # which may still read what was evicted or moved
        image = read_image(load.image)
        self._check_fits(load, image)
        self._copy = _Copy(load=load, image=image, remaining=deque(image.header.slices))

    def copy_some(self, max_bytes: int) -> bool:
        """Copy at most `max_bytes`, but one row at least; return whether the load is complete."""
        copy = self._copy
        assert copy is not None, "a load has begun"
        num_bytes_left = max_bytes
        while copy.remaining:
            part = copy.remaining[0]
            row_bytes = (part.in_features + part.out_features) * self._arena.dtype.itemsize
            num_rows = min(part.rank - copy.num_rows_done, num_bytes_left // row_bytes)
            if num_rows <= 0:
                if num_bytes_left < max_bytes:
                    return False
                num_rows = 1
            self._copy_rows(copy, part, num_rows)
            num_bytes_left -= num_rows * row_bytes
        self._copies.precede_steps()
        self._set_tables(copy)
        self._copy = None
        return True

    def cancel(self) -> None:
        """Forget the load under way; its rows keep what was copied, which nobody reads."""
        self._copy = None

    def _copy_rows(self, copy: _Copy, part: ImageSlice, num_rows: int) -> None:
        start, stop = copy.num_rows_done, copy.num_rows_done + num_rows
        row0 = copy.load.spans[self._arena.module(part.module).group].row0
        span = Span(row0=row0 + start, num_rows=num_rows)
        a, b = self._arena.places(part.module, part.layer, part.slice_index, span)
        self._copies.copy(a, self._tensor(copy.image.a(part)[start:stop]))
        self._copies.copy(b, self._tensor(copy.image.b(part)[start:stop]))
        copy.num_rows_done = stop
        if stop == part.rank:
            copy.remaining.popleft()
            copy.num_rows_done = 0

    def _tensor(self, words: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(words).view(self._arena.dtype)

    def _set_tables(self, copy: _Copy) -> None:
        ranks: dict[str, list[list[int]]] = {}
        scales: dict[str, list[list[float]]] = {}
        for part in copy.image.header.slices:
            if part.module not in ranks:
                num_slices = self._arena.module(part.module).num_slices
                num_layers = self._arena.num_layers_of(part.module)
                ranks[part.module] = [[0] * num_slices for _ in range(num_layers)]
                scales[part.module] = [[0.0] * num_slices for _ in range(num_layers)]
            ranks[part.module][part.layer][part.slice_index] = part.rank
            scales[part.module][part.layer][part.slice_index] = part.scale
        self._arena.set_adapter(
            copy.load.lora_index,
            spans={
                group: Span(row0=span.row0, num_rows=span.num_rows)
                for group, span in copy.load.spans.items()
            },
            ranks=ranks,
            scales=scales,
        )

    def _check_fits(self, load: PendingLoad, image: ArenaImage) -> None:
        dtype = IMAGE_DTYPES.get(image.header.dtype)
        if dtype is not self._arena.dtype:
            raise ImageBroken(f"the arena image is {dtype}, the arena {self._arena.dtype}")
        modules = {module.name: module for module in self._arena.modules}
        for part in image.header.slices:
            module = modules.get(part.module)
            span = None if module is None else load.spans.get(module.group)
            if (
                module is None
                or span is None
                or part.rank > span.num_rows
                or part.layer >= self._arena.num_layers_of(part.module)
                or part.in_features != module.in_features
                or part.out_features != module.slice_out_features[part.slice_index]
            ):
                raise ImageBroken(
                    f"the arena image's slice {part.slice_index} of {part.module} in layer "
                    f"{part.layer} doesn't fit this arena"
                )
