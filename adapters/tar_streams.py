"""The bytes of a tar, plain or packed by gzip, forward only and counted."""

import zlib
from typing import BinaryIO, Protocol

from adapters.members import Damaged
from adapters.meter import Meter

# Small, since what is left of it is copied at the end of each gzip member.
_PACKED_BYTES = 32 << 10
_GZIP = 31


class ByteStream(Protocol):
    """What is read forward only; `read` returns less than asked for at the end alone."""

    def read(self, size: int, /) -> bytes: ...


class PlainStream:
    """The bytes of a file as they are."""

    def __init__(self, file: BinaryIO, meter: Meter) -> None:
        self._file = file
        self._meter = meter

    def read(self, size: int, /) -> bytes:
        data = self._file.read(size)
        self._meter.count(len(data))
        return data


class GzipStream:
    """The unpacked bytes of a gzip file of one or several members; their checksums are asked.

    zlib reads the headers, so that none of them costs more than its bytes.
    """

    def __init__(self, file: BinaryIO, meter: Meter) -> None:
        self._file = file
        self._meter = meter
        self._inflater = zlib.decompressobj(wbits=_GZIP)
        self._packed = b""
        self._is_between_members = False

    def read(self, size: int, /) -> bytes:
        pieces: list[bytes] = []
        while size and self._has_more():
            piece = self._inflate(size)
            size -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    def _has_more(self) -> bool:
        if not self._packed:
            self._packed = self._file.read(_PACKED_BYTES)
        if self._is_between_members:
            # Zeros up to the end of a block may follow the last member.
            self._packed = self._packed.lstrip(b"\0") or self._file.read(_PACKED_BYTES)
            return bool(self._packed)
        if not self._packed:
            raise Damaged("it is truncated")
        return True

    def _inflate(self, size: int) -> bytes:
        if self._is_between_members:
            if self._packed.startswith(b"\0"):
                return b""
            self._inflater = zlib.decompressobj(wbits=_GZIP)
            self._is_between_members = False
        data = self._inflater.decompress(self._packed, size)
        if self._inflater.eof:
            self._packed = self._inflater.unused_data
            self._is_between_members = True
        else:
            self._packed = self._inflater.unconsumed_tail
        self._meter.count(len(data))
        return data
