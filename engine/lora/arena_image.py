"""An adapter laid out as the arena wants it, in one file that is mapped, not read.

    8 bytes    magic, with the format's number
    8 bytes    length of the header, little-endian
    header     JSON: ImageHeader
    padding    zeros up to the next multiple of 64
    matrices   raw values in the arena's number format, each at its offset from here

Per module, layer and slice there are A as [rank, in] and B transposed as [rank, out]. A file only
ever gets its final name when it is complete.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from adapters.peft_format import ModuleLora, PeftAdapter
from engine.errors import EngineError
from engine.lora.number_formats import IMAGE_WORDS, to_words

MAGIC = b"LPARENA1"
PREFIX_BYTES = len(MAGIC) + 8
ALIGNMENT = 64
UNFINISHED_SUFFIX = ".unfinished"

# Where each LoRA target sits in the packed modules: module and slice.
PLACE_OF_TARGET = {
    "q_proj": ("qkv", 0),
    "k_proj": ("qkv", 1),
    "v_proj": ("qkv", 2),
    "o_proj": ("o", 0),
    "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", 1),
    "down_proj": ("down", 0),
    "embed_tokens": ("embedding", 0),
    "lm_head": ("head", 0),
}


class ImageBroken(EngineError):
    """An arena image can't be used: missing, cut short, or of another layout."""

    code = "adapter_image_broken"
    status = 500


class ImageSlice(msgspec.Struct, frozen=True, kw_only=True):
    """One module's slice in one layer; offsets count from the first matrix."""

    module: str
    layer: int
    slice_index: int
    rank: int
    scale: float
    in_features: int
    out_features: int
    a_offset: int
    b_offset: int


class ImageHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What an image holds.

    content_digest  "sha256:…" of the adapter's content (adapters.digest), whatever its name is
    dtype         "bf16" or "fp32"
    num_rows      rank rows by arena group
    matrix_bytes  from the first matrix to the file's end
    """

    content_digest: str
    dtype: str
    num_rows: dict[str, int]
    max_rank: int
    matrix_bytes: int
    slices: tuple[ImageSlice, ...]


class ArenaImage:
    """A mapped image. Matrices are views of the mapping: raw words, uint16 for bf16."""

    def __init__(self, header: ImageHeader, matrices: np.ndarray[Any, Any]) -> None:
        self.header = header
        self._matrices = matrices  # [matrix_bytes] of uint8

    def a(self, part: ImageSlice) -> np.ndarray[Any, Any]:
        """Return the slice's A, [rank, in]."""
        return self._matrix(part.a_offset, part.rank, part.in_features)

    def b(self, part: ImageSlice) -> np.ndarray[Any, Any]:
        """Return the slice's transposed B, [rank, out]."""
        return self._matrix(part.b_offset, part.rank, part.out_features)

    def _matrix(self, offset: int, rows: int, columns: int) -> np.ndarray[Any, Any]:
        word = IMAGE_WORDS[self.header.dtype]
        num_bytes = rows * columns * word.itemsize
        return self._matrices[offset : offset + num_bytes].view(word).reshape(rows, columns)


def build_image(
    adapter: PeftAdapter, path: Path, *, content_digest: str, dtype: str
) -> ImageHeader:
    """Write the image of an inspected adapter under its final name, in one step.

    content_digest is what adapters.digest says of the adapter's files.
    dtype is "bf16" (fp32 is rounded to nearest, ties to even) or "fp32". Raises NumberOutOfRange
    for a value that bf16 can't hold. On failure nothing is left behind.
    """
    header = _lay_out(adapter, content_digest=content_digest, dtype=dtype)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED_SUFFIX}")
    try:
        with unfinished.open("wb") as file:
            _write(file, adapter, header)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return header


def read_header(path: Path) -> ImageHeader:
    """Return what a complete image holds; raises ImageBroken."""
    with _open(path) as file:
        return _read_header(file)


def read_image(path: Path) -> ArenaImage:
    """Map a complete image; raises ImageBroken."""
    with _open(path) as file:
        header = _read_header(file)
        if header.matrix_bytes == 0:
            return ArenaImage(header, np.empty(0, dtype=np.uint8))
        start = _aligned(file.tell())
        # Private, so that torch may take it for writable memory; nobody writes.
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_WILLNEED"):
        mapping.madvise(mmap.MADV_WILLNEED)
    return ArenaImage(header, np.frombuffer(mapping, dtype=np.uint8, offset=start))


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ImageBroken(f"the arena image can't be opened: {error.strerror}") from error


def _read_header(file: BinaryIO) -> ImageHeader:
    """Read up to the end of the header, and check that the file is as long as it says."""
    start = file.read(PREFIX_BYTES)
    length = int.from_bytes(start[len(MAGIC) :], "little")
    file_bytes = os.fstat(file.fileno()).st_size
    if not start.startswith(MAGIC) or length > file_bytes:
        raise ImageBroken("the arena image is of another format")
    try:
        header = msgspec.json.decode(file.read(length), type=ImageHeader)
    except msgspec.MsgspecError as error:
        raise ImageBroken(f"the arena image's header is broken: {error}") from error
    expected = _aligned(PREFIX_BYTES + length) + header.matrix_bytes
    if file_bytes != expected:
        raise ImageBroken(f"the arena image has {file_bytes} bytes, not {expected}")
    return header


def _lay_out(adapter: PeftAdapter, *, content_digest: str, dtype: str) -> ImageHeader:
    """Give every matrix its place."""
    itemsize = IMAGE_WORDS[dtype].itemsize
    slices = []
    offset = 0
    for lora in adapter.loras:
        module, slice_index = PLACE_OF_TARGET[lora.target]
        in_features, out_features = lora.a.shape[1], lora.b.shape[0]
        b_offset = offset + _aligned(lora.rank * in_features * itemsize)
        slices.append(
            ImageSlice(
                module=module,
                layer=lora.layer,
                slice_index=slice_index,
                rank=lora.rank,
                scale=lora.scale,
                in_features=in_features,
                out_features=out_features,
                a_offset=offset,
                b_offset=b_offset,
            )
        )
        offset = b_offset + _aligned(lora.rank * out_features * itemsize)
    return ImageHeader(
        content_digest=content_digest,
        dtype=dtype,
        num_rows=adapter.rows(),
        max_rank=max((lora.rank for lora in adapter.loras), default=0),
        matrix_bytes=offset,
        slices=tuple(slices),
    )


def _write(file: BinaryIO, adapter: PeftAdapter, header: ImageHeader) -> None:
    encoded = msgspec.json.encode(header)
    file.write(MAGIC + len(encoded).to_bytes(PREFIX_BYTES - len(MAGIC), "little") + encoded)
    _pad(file)
    for lora in adapter.loras:
        for matrix in _matrices(lora, dtype=header.dtype):
            file.write(np.ascontiguousarray(matrix).data)
            _pad(file)


def _matrices(lora: ModuleLora, *, dtype: str) -> Iterator[np.ndarray[Any, Any]]:
    """Yield A, then B transposed, in the arena's words."""
    yield to_words(lora.a.read(), source=lora.a.dtype, dtype=dtype)
    yield to_words(lora.b.read(), source=lora.b.dtype, dtype=dtype).T


def _pad(file: BinaryIO) -> None:
    """Write zeros up to the next aligned place."""
    position = file.tell()
    file.write(bytes(_aligned(position) - position))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
