"""Opens an archive by what is in it, not by its name, and turns damage into words.

Nothing here writes a file whose name an archive has chosen.
"""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapters.errors import AdapterInvalid
from adapters.limits import UploadLimits
from adapters.members import ArchiveReader, Damaged
from adapters.meter import Meter
from adapters.tar_archive import TarArchive
from adapters.tar_streams import GzipStream, PlainStream
from adapters.words import printable
from adapters.zip_archive import ZipArchive

_OTHER_FORMATS = (
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"7z\xbc\xaf", "7z"),
    (b"Rar!", "rar"),
)


@contextmanager
def open_archive(path: Path, meter: Meter, limits: UploadLimits) -> Iterator[ArchiveReader]:
    """Open a tar, tar.gz or zip.

    Raises AdapterInvalid for other formats and for damaged files, AdapterTooLarge past a limit.
    """
    with path.open("rb") as file:
        start = file.read(512)
    try:
        yield _reader(path, start, meter, limits)
    except (Damaged, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise AdapterInvalid([f"the archive is damaged: {_shown(error)}"]) from error
    except (RuntimeError, ValueError, LookupError, OverflowError, struct.error) as error:
        raise AdapterInvalid([f"the archive can't be read: {_shown(error)}"]) from error


def _shown(error: Exception) -> str:
    return printable(str(error)[:300]) or "it ends too early"


def _reader(path: Path, start: bytes, meter: Meter, limits: UploadLimits) -> ArchiveReader:
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return ZipArchive(path, meter, limits)
    if start.startswith(b"\x1f\x8b"):
        return TarArchive(path, meter, open_stream=GzipStream)
    if start[257:262] == b"ustar" or start == bytes(512):
        return TarArchive(path, meter, open_stream=PlainStream)
    for magic, kind in _OTHER_FORMATS:
        if start.startswith(magic):
            raise AdapterInvalid([f"{kind} archives aren't read: use tar, tar.gz or zip"])
    raise AdapterInvalid(["the file is no archive that is read here: use tar, tar.gz or zip"])
