"""An upload as it comes over the wire, into a flat directory of staged files."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from anyio import CancelScope, CapacityLimiter, fail_after, to_thread
from starlette.requests import Request
from starlette.types import Message, Receive

from adapters.archive import UnpackReport, collect_directory, move_files, unpack
from adapters.limits import MAX_MEMBER_NAME_BYTES, UploadLimits
from adapters.names import check_adapter_name
from adapters.store import AdapterStore
from adapters.words import printable
from gateway.admin_types import PathUpload
from gateway.errors import BodyTooSlow, InvalidRequest
from gateway.multipart import FilePart, ReceivedForm, receive_form
from gateway.parsing import blaming, parse_json, read_body, with_bounded_body
from gateway.settings import GatewaySettings

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".zip")
TEXT_FIELDS = ("name", "base", "promote", "allow_no_effect")
FILE_FIELDS = ("files", "file")
# Unpacked at once; the others wait, so that streams of other people keep their share.
MAX_UNPACKED_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedUpload:
    """What was uploaded: `directory` holds the needed files alone, until the staging ends.

    `name` has a form that is allowed; nothing else was looked at yet.
    """

    name: str
    base: str | None
    promote: bool
    allow_no_effect: bool
    directory: Path
    report: UnpackReport


class UploadDesk:
    """Takes uploads in, within the settings' limits of bytes and time."""

    def __init__(self, *, store: AdapterStore, settings: GatewaySettings) -> None:
        self._store = store
        self._settings = settings
        self._limits = UploadLimits(max_total_bytes=settings.max_upload_bytes)
        self._threads = CapacityLimiter(MAX_UNPACKED_AT_ONCE)

    @asynccontextmanager
    async def staged(self, request: Request) -> AsyncIterator[StagedUpload]:
        """Hold an upload's files in the store's staging directory; they are gone after the block.

        Takes a multipart form, or JSON with a path. Raises InvalidRequest, BodyTooLarge,
        BodyTooSlow or AdapterError, and leaves nothing behind then.
        """
        limited = Request(request.scope, timely(request.receive, self._settings))
        if request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            async with self._room() as room:
                yield await self._from_form(limited, room)
        else:
            body = await read_body(limited, max_bytes=self._settings.max_body_bytes)
            wanted = parse_json(body, PathUpload)
            with blaming("name"):
                check_adapter_name(wanted.name)
            async with self.staged_path(wanted, param="path") as upload:
                yield upload

    @asynccontextmanager
    async def staged_path(self, wanted: PathUpload, *, param: str) -> AsyncIterator[StagedUpload]:
        """Hold a copy of the directory or archive at `wanted.path`, as `staged` does.

        The path must lie below an allowed root; `param` is the field that is named if it doesn't.
        """
        source = await to_thread.run_sync(
            partial(_below_allowed_root, wanted.path, self._settings.allowed_roots, param=param)
        )
        async with self._room() as room:
            directory = room / "adapter"
            yield StagedUpload(
                name=wanted.name,
                base=wanted.base,
                promote=wanted.promote,
                allow_no_effect=wanted.allow_no_effect,
                directory=directory,
                report=await self._in_thread(_collect_path, source, directory),
            )

    @asynccontextmanager
    async def _room(self) -> AsyncIterator[Path]:
        staging = self._store.staging()
        room = await to_thread.run_sync(staging.__enter__)
        try:
            yield room
        finally:
            with CancelScope(shield=True):
                await to_thread.run_sync(staging.__exit__, None, None, None)

    async def _from_form(self, request: Request, room: Path) -> StagedUpload:
        received, directory = room / "received", room / "adapter"
        await to_thread.run_sync(received.mkdir)
        bounded = with_bounded_body(request, max_bytes=self._settings.max_upload_bytes)
        form = await receive_form(bounded, received)
        _refuse_unknown_fields(form)
        name = _text(form, "name")
        if name is None:
            raise InvalidRequest("the field `name` is missing", param="name", code="missing_field")
        with blaming("name"):
            check_adapter_name(name)
        base, promote = _text(form, "base"), _truth(form, "promote")
        files = _named_files(form.files)
        return StagedUpload(
            name=name,
            base=base,
            promote=promote,
            allow_no_effect=_truth(form, "allow_no_effect"),
            directory=directory,
            report=await self._in_thread(_collect_files, files, directory),
        )

    async def _in_thread(
        self, collect: Callable[..., UnpackReport], source: object, directory: Path
    ) -> UnpackReport:
        work = partial(collect, source, directory, limits=self._limits)
        return await to_thread.run_sync(work, limiter=self._threads)


def _collect_path(source: Path, directory: Path, *, limits: UploadLimits) -> UnpackReport:
    directory.mkdir()
    if source.is_dir():
        return collect_directory(source, directory, limits=limits)
    return unpack(source, source.name, directory, limits=limits)


def _collect_files(
    files: dict[str, Path], directory: Path, *, limits: UploadLimits
) -> UnpackReport:
    """Unpack the one archive, when the upload is one file with the name of an archive."""
    directory.mkdir()
    if len(files) == 1:
        ((filename, path),) = files.items()
        if filename.lower().endswith(ARCHIVE_SUFFIXES):
            return unpack(path, filename, directory, limits=limits)
    return move_files(files, directory)


def _below_allowed_root(path: str, roots: tuple[Path, ...], *, param: str) -> Path:
    """Return the real path, or refuse in words that say nothing about what exists elsewhere."""
    refusal = InvalidRequest(
        f"{param} must be absolute, and name a directory or an archive below one of the "
        "directories that this gateway may read (`serve --allowed-root DIRECTORY`)",
        param=param,
        code="path_not_allowed",
    )
    try:
        real = Path(path).resolve(strict=True)
        allowed = any(real.is_relative_to(root.resolve()) for root in roots)
    except (OSError, ValueError, RuntimeError):
        raise refusal from None
    if not allowed or not Path(path).is_absolute():
        raise refusal
    return real


def timely(receive: Receive, settings: GatewaySettings) -> Receive:
    """Return `receive`, which raises BodyTooSlow when a body stops coming or never ends."""
    started = time.monotonic()
    silence_s, timeout_s = settings.upload_silence_s, settings.upload_timeout_s

    async def timely_receive() -> Message:
        passed_s = time.monotonic() - started
        if passed_s > timeout_s:
            raise BodyTooSlow(
                f"the upload has come in for {passed_s:.0f} seconds; at most {timeout_s:g} are "
                "waited"
            )
        try:
            with fail_after(silence_s):
                return await receive()
        except TimeoutError:
            raise BodyTooSlow(
                f"nothing of the upload came for {silence_s:g} seconds, and longer isn't waited"
            ) from None

    return timely_receive


def _refuse_unknown_fields(form: ReceivedForm) -> None:
    for name in [*(name for name, _ in form.texts), *(file.field for file in form.files)]:
        if name not in TEXT_FIELDS + FILE_FIELDS:
            shown = printable(name[:80])
            raise InvalidRequest(
                f"the field `{shown}` isn't supported", param=shown, code="unsupported_field"
            )
    for file in form.files:
        if file.field in TEXT_FIELDS:
            raise InvalidRequest(
                f"the field `{file.field}` takes one piece of text, not a file", param=file.field
            )
    for name, _ in form.texts:
        if name in FILE_FIELDS:
            raise InvalidRequest(
                f"the field `{name}` takes a file, with a filename, not text", param=name
            )


def _text(form: ReceivedForm, name: str) -> str | None:
    values = [text for field, text in form.texts if field == name]
    if not values:
        return None
    if len(values) > 1 or not values[0]:
        raise InvalidRequest(f"the field `{name}` takes one piece of text", param=name)
    return values[0]


def _truth(form: ReceivedForm, name: str) -> bool:
    text = _text(form, name)
    if text not in {None, "true", "false"}:
        raise InvalidRequest(f"the field `{name}` is `true` or `false`", param=name)
    return text == "true"


def _named_files(parts: list[FilePart]) -> dict[str, Path]:
    """Return the received files by the names that the client gave them."""
    if not parts:
        raise InvalidRequest(
            "give the adapter's files, or one archive, as file parts named `files`",
            param="files",
            code="missing_field",
        )
    files: dict[str, Path] = {}
    for part in parts:
        name = _clean_name(part.filename)
        if name in files:
            raise InvalidRequest(f"two parts are named {name[:200]!r}", param="files")
        files[name] = part.path
    return files


def _clean_name(filename: str) -> str:
    name = PurePosixPath(filename.replace("\\", "/"))
    is_plain = name.parts and not name.is_absolute() and ".." not in name.parts
    if not is_plain or "\0" in filename or len(filename.encode()) > MAX_MEMBER_NAME_BYTES:
        raise InvalidRequest(
            f"{printable(filename[:200])!r} can't be a file's name: it is relative, has no `..` "
            f"in it, and at most {MAX_MEMBER_NAME_BYTES} bytes",
            param="files",
        )
    return printable(str(name))
