"""The safetensors files of a Hugging Face directory, read by tensor name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import InvalidModel
from engine.model.json_file import read_json

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_READABLE = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


class Checkpoint:
    """Names, shapes and values of one checkpoint's tensors; only headers are read at first.

    Files stay open (memory-mapped) as long as the object lives.
    """

    def __init__(self, directory: Path) -> None:
        self.files = weight_files(directory)
        self._handle_of: dict[str, Any] = {}
        for file in self.files:
            with _words_for(file.name):
                handle: Any = safe_open(file, framework="pt")
                for name in handle.keys():  # noqa: SIM118 - not a mapping
                    if name in self._handle_of:
                        raise InvalidModel(f"tensor {name} is in two files, one is {file.name}")
                    self._handle_of[name] = handle

    @property
    def names(self) -> frozenset[str]:
        """Every tensor of every file."""
        return frozenset(self._handle_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that the header gives."""
        return tuple(self._handle_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return "fp32", "fp16" or "bf16"; raises InvalidModel naming any other format."""
        raw = str(self._handle_of[name].get_slice(name).get_dtype())
        if raw not in _READABLE:
            raise InvalidModel(
                f"tensor {name} is stored as {raw}; supported are {', '.join(_READABLE)}"
            )
        return _READABLE[raw]

    def copy_into(self, out: torch.Tensor, name: str) -> None:
        """Write a tensor into `out` of the same shape, converted to its format."""
        with _words_for(f"tensor {name}"):
            out.copy_(self._handle_of[name].get_tensor(name))


def weight_files(directory: Path) -> tuple[Path, ...]:
    """Return the safetensors files of `directory` in name order; raises InvalidModel in words."""
    if (directory / _INDEX_FILE).is_file():
        return _sharded_files(directory)
    if (directory / _SINGLE_FILE).is_file():
        return (directory / _SINGLE_FILE,)
    if list(directory.glob("*.bin")) or list(directory.glob("*.pt*")):
        raise InvalidModel(
            "the checkpoint has only pickled weights (.bin), which are never read because they "
            "can run code; save it again with save_pretrained(..., safe_serialization=True)"
        )
    raise InvalidModel(f"the checkpoint has neither {_SINGLE_FILE} nor {_INDEX_FILE}")


def _sharded_files(directory: Path) -> tuple[Path, ...]:
    weight_map = read_json(directory / _INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidModel(f"{_INDEX_FILE} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise InvalidModel(f"{_INDEX_FILE} names a file outside the checkpoint: {outside[0]!r}")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise InvalidModel(
            f"{len(missing)} of {len(names)} weight files are missing: {', '.join(missing[:3])}"
        )
    return tuple(directory / name for name in names)


@contextmanager
def _words_for(what: str) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise InvalidModel(f"{what} can't be read as safetensors: {error}") from error
