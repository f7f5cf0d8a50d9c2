"""What the core and its loader process say to each other: msgpack in length-prefixed frames."""

from pathlib import Path

import msgspec

from adapters.base_description import BaseDescription

LENGTH_BYTES = 4


class LoadJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Lay the PEFT folder `directory` out as an arena image below `image_dir`.

    dtype is the arena's: "bf16" or "fp32".
    """

    lora_id: str
    directory: str
    image_dir: str
    base: BaseDescription
    dtype: str


class LoadDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The image is complete.

    content_digest   "sha256:…" of what the files held, whatever they are called here
    num_rows         rank rows by arena group
    """

    lora_id: str
    image_path: str
    content_digest: str
    num_rows: dict[str, int]
    max_rank: int

    @property
    def image(self) -> Path:
        """Where the image is."""
        return Path(self.image_path)


class LoadRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The adapter can't be applied exactly; every reason is listed."""

    lora_id: str
    problems: tuple[str, ...]


class LoadBroken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The job ended without an answer about the adapter; the same job may succeed later."""

    lora_id: str
    message: str


LoadResult = LoadDone | LoadRefused | LoadBroken


def encode_frame(message: LoadJob | LoadResult) -> bytes:
    """Return a message as it travels."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class FrameBuffer:
    """Puts frames together from whatever pieces the pipe yields."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next bytes; return the bodies that they complete."""
        self._bytes += piece
        bodies: list[bytes] = []
        while len(self._bytes) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._bytes[:LENGTH_BYTES], "little")
            if len(self._bytes) < end:
                break
            bodies.append(bytes(self._bytes[LENGTH_BYTES:end]))
            del self._bytes[:end]
        return bodies
