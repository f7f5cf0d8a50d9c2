"""An upload as it comes over the wire, into a flat directory of staged files."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from anyio import CancelScope, to_thread
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from adapters.archive import UnpackReport, collect_directory, unpack
from adapters.limits import UploadLimits
from adapters.names import check_adapter_name
from adapters.store import AdapterStore
from gateway.admin_types import PathUpload
from gateway.errors import InvalidRequest
from gateway.parsing import blaming, parse_json, read_body, with_bounded_body
from gateway.settings import GatewaySettings

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".zip")
FORM_FIELDS = frozenset({"name", "base", "promote", "files", "file"})
MAX_FILES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedUpload:
    """What was uploaded: `directory` holds the needed files alone, until the staging ends.

    `name` has a form that is allowed; nothing else was looked at yet.
    """

    name: str
    base: str | None
    promote: bool
    directory: Path
    report: UnpackReport


@asynccontextmanager
async def staged_upload(
    request: Request, *, store: AdapterStore, settings: GatewaySettings
) -> AsyncIterator[StagedUpload]:
    """Hold an upload's files in the store's staging directory; they are gone after the block.

    Takes a multipart form, or JSON with a path. Raises InvalidRequest, BodyTooLarge or
    AdapterError, and leaves nothing behind then.
    """
    if request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        async with _room(store) as room:
            yield await _from_form(request, room, settings)
    else:
        body = await read_body(request, max_bytes=settings.max_body_bytes)
        wanted = parse_json(body, PathUpload)
        with blaming("name"):
            check_adapter_name(wanted.name)
        async with staged_path(wanted, store=store, settings=settings, param="path") as upload:
            yield upload


@asynccontextmanager
async def staged_path(
    wanted: PathUpload, *, store: AdapterStore, settings: GatewaySettings, param: str
) -> AsyncIterator[StagedUpload]:
    """Hold a copy of the directory or archive at `wanted.path`, as `staged_upload` does.

    The path must lie below an allowed root; `param` is the field that is named if it doesn't.
    """
    source = await to_thread.run_sync(
        partial(_below_allowed_root, wanted.path, settings.allowed_roots, param=param)
    )
    async with _room(store) as room:
        directory = room / "adapter"
        report = await to_thread.run_sync(_collect, source, directory, settings.max_upload_bytes)
        yield StagedUpload(
            name=wanted.name,
            base=wanted.base,
            promote=wanted.promote,
            directory=directory,
            report=report,
        )


@asynccontextmanager
async def _room(store: AdapterStore) -> AsyncIterator[Path]:
    staging = store.staging()
    room = await to_thread.run_sync(staging.__enter__)
    try:
        yield room
    finally:
        with CancelScope(shield=True):
            await to_thread.run_sync(staging.__exit__, None, None, None)


async def _from_form(request: Request, room: Path, settings: GatewaySettings) -> StagedUpload:
    bounded = with_bounded_body(request, max_bytes=settings.max_upload_bytes)
    async with bounded.form(max_files=MAX_FILES, max_fields=16) as form:
        unknown = sorted(set(form) - FORM_FIELDS)
        if unknown:
            raise InvalidRequest(
                f"the field `{unknown[0]}` isn't supported",
                param=unknown[0],
                code="unsupported_field",
            )
        name, base = _text(form, "name"), _text(form, "base")
        if name is None:
            raise InvalidRequest("the field `name` is missing", param="name", code="missing_field")
        with blaming("name"):
            check_adapter_name(name)
        promote = _truth(form, "promote")
        received = room / "received"
        await to_thread.run_sync(_write_parts, _files(form), received)
    directory = room / "adapter"
    source = await to_thread.run_sync(_single_archive, received)
    report = await to_thread.run_sync(
        _collect, source or received, directory, settings.max_upload_bytes
    )
    return StagedUpload(name=name, base=base, promote=promote, directory=directory, report=report)


def _collect(source: Path, directory: Path, max_bytes: int) -> UnpackReport:
    directory.mkdir()
    limits = UploadLimits(max_total_bytes=max_bytes)
    if source.is_dir():
        return collect_directory(source, directory, limits=limits)
    return unpack(source, source.name, directory, limits=limits)


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


def _text(form: FormData, name: str) -> str | None:
    values = form.getlist(name)
    if not values:
        return None
    if len(values) > 1 or not isinstance(values[0], str) or not values[0]:
        raise InvalidRequest(f"the field `{name}` takes one piece of text", param=name)
    return values[0]


def _truth(form: FormData, name: str) -> bool:
    text = _text(form, name)
    if text not in {None, "true", "false"}:
        raise InvalidRequest(f"the field `{name}` is `true` or `false`", param=name)
    return text == "true"


def _files(form: FormData) -> list[UploadFile]:
    parts = [*form.getlist("files"), *form.getlist("file")]
    files = [part for part in parts if isinstance(part, UploadFile)]
    if not files or len(files) < len(parts):
        raise InvalidRequest(
            "give the adapter's files, or one archive, as file parts named `files`",
            param="files",
            code="missing_field",
        )
    return files


def _write_parts(files: list[UploadFile], received: Path) -> None:
    for file in files:
        target = received / _relative_name(file.filename or "")
        if target.exists():
            raise InvalidRequest(f"two parts are named {target.name!r}", param="files")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as out:
            shutil.copyfileobj(file.file, out, 1 << 20)


def _relative_name(filename: str) -> PurePosixPath:
    name = PurePosixPath(filename.replace("\\", "/"))
    is_plain = name.parts and not name.is_absolute() and ".." not in name.parts
    if not is_plain or "\0" in filename or any(len(part.encode()) > 255 for part in name.parts):
        raise InvalidRequest(f"{filename[:200]!r} can't be a file's name", param="files")
    return name


def _single_archive(received: Path) -> Path | None:
    """Return the archive, when the upload is one file with the name of an archive."""
    files = [path for path in received.rglob("*") if path.is_file()]
    if len(files) == 1 and files[0].name.lower().endswith(ARCHIVE_SUFFIXES):
        return files[0]
    return None
