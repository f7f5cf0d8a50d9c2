"""A multipart form, written to files of our own naming while it comes in."""

from dataclasses import dataclass, field
from pathlib import Path

from anyio import to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from adapters.limits import (
    MAX_FORM_FILES,
    MAX_FORM_HEADER_BYTES,
    MAX_FORM_HEADERS,
    MAX_FORM_TEXT_BYTES,
    MAX_FORM_TEXTS,
)
from gateway.errors import BodyTooLarge, InvalidRequest

_PENDING_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """A file of the form: the name is the client's, the path is ours."""

    field: str
    filename: str
    path: Path


@dataclass(slots=True, kw_only=True)
class ReceivedForm:
    """The parts of a form in the order in which they came."""

    texts: list[tuple[str, str]] = field(default_factory=list)
    files: list[FilePart] = field(default_factory=list)


async def receive_form(request: Request, folder: Path) -> ReceivedForm:
    """Read a whole form; its files are `folder`/0, `folder`/1 and so on.

    Raises InvalidRequest for a form that is broken or ends too early, BodyTooLarge past a limit.
    """
    _, options = parse_options_header(request.headers["content-type"])
    boundary = options.get(b"boundary")
    if not boundary:
        raise InvalidRequest("the content-type multipart/form-data lacks its boundary")
    receiver = _Receiver(folder)
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": receiver.begin_part,
                "on_header_field": receiver.header_name,
                "on_header_value": receiver.header_value,
                "on_header_end": receiver.end_header,
                "on_headers_finished": receiver.end_headers,
                "on_part_data": receiver.part_data,
                "on_part_end": receiver.end_part,
                "on_end": receiver.end,
            },
            max_header_count=MAX_FORM_HEADERS,
            max_header_size=MAX_FORM_HEADER_BYTES,
        )
        async for piece in request.stream():
            parser.write(piece)
            if receiver.num_pending_bytes >= _PENDING_BYTES:
                await to_thread.run_sync(receiver.write_pending)
    except FormParserError as error:
        raise InvalidRequest(
            f"the form can't be read: {error}. A part has at most {MAX_FORM_HEADERS} header "
            f"lines of at most {MAX_FORM_HEADER_BYTES} bytes, and a boundary before it and after it"
        ) from None
    if not receiver.has_ended:
        raise InvalidRequest("the form ends before its last boundary, so a part may be cut")
    await to_thread.run_sync(receiver.write_pending)
    return receiver.form


class _Receiver:
    """Gathers what the parser finds; files go to the disk when `write_pending` is called."""

    def __init__(self, folder: Path) -> None:
        self.form = ReceivedForm()
        self.has_ended = False
        self.num_pending_bytes = 0
        self._folder = folder
        self._pending: list[tuple[Path, bytes]] = []
        self._header: tuple[bytes, bytes] = (b"", b"")
        self._disposition = b""
        self._field = ""
        self._file: FilePart | None = None
        self._text = b""

    def begin_part(self) -> None:
        self._disposition, self._file, self._text = b"", None, b""

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0] + data[start:end], self._header[1])

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0], self._header[1] + data[start:end])

    def end_header(self) -> None:
        name, value = self._header
        self._header = (b"", b"")
        if name.lower() == b"content-disposition":
            self._disposition = value

    def end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise InvalidRequest("a part of the form has no name in its content-disposition")
        self._field = _decoded(options[b"name"])
        if b"filename" in options:
            number = len(self.form.files)
            if number >= MAX_FORM_FILES:
                raise BodyTooLarge(
                    f"the form has {number + 1} files or more; it takes {MAX_FORM_FILES}"
                )
            self._file = FilePart(
                field=self._field,
                filename=_decoded(options[b"filename"]),
                path=self._folder / str(number),
            )
            self.form.files.append(self._file)
            self._pending.append((self._file.path, b""))
        elif len(self.form.texts) >= MAX_FORM_TEXTS:
            raise BodyTooLarge(
                f"the form has {MAX_FORM_TEXTS + 1} fields of text or more; it takes "
                f"{MAX_FORM_TEXTS}"
            )

    def part_data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if self._file is not None:
            self._pending.append((self._file.path, piece))
            self.num_pending_bytes += len(piece)
            return
        self._text += piece
        if len(self._text) > MAX_FORM_TEXT_BYTES:
            raise BodyTooLarge(
                f"the field `{self._field[:80]}` has {len(self._text)} bytes or more; it takes "
                f"{MAX_FORM_TEXT_BYTES}"
            )

    def end_part(self) -> None:
        if self._file is None:
            self.form.texts.append((self._field, _decoded(self._text)))

    def end(self) -> None:
        self.has_ended = True

    def write_pending(self) -> None:
        for path, data in self._pending:
            with path.open("ab") as out:
                out.write(data)
        self._pending.clear()
        self.num_pending_bytes = 0


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("the form holds a name or a text that isn't UTF-8") from None
