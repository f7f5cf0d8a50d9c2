import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.limits import MAX_HEADER_BYTES
from adapters.safetensors_header import read_header
from tests.adapters.worlds import safetensors_bytes, with_header


def entry(begin: int, end: int, **changes: Any) -> dict[str, Any]:
    fields = {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}
    return fields | changes


def problems(folder: Path, raw: bytes) -> tuple[str, ...]:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(raw)
    return read_header(path).problems


def test_a_sound_file_is_read_with_offsets_from_its_start(tmp_path: Path) -> None:
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(2, np.float32)}
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(arrays))

    reading = read_header(path)

    assert reading.problems == ()
    for tensor in reading.tensors:
        np.testing.assert_array_equal(tensor.read(), arrays[tensor.name])


@pytest.mark.parametrize(
    ("header", "body_bytes", "words"),
    [
        ({"x": entry(0, 8), "y": entry(4, 12)}, 12, "overlaps"),
        ({"x": entry(0, 8), "y": entry(0, 8)}, 8, "overlaps"),
        ({"x": entry(0, 8), "y": entry(12, 16)}, 16, "belong to no tensor"),
        ({"x": entry(4, 8)}, 8, "belong to no tensor"),
        ({"x": entry(0, 8)}, 12, "belong to none"),
        ({"x": entry(0, 8)}, 4, "truncated"),
        ({"x": entry(0, 1 << 40)}, 8, "truncated"),
        ({"x": entry(0, 8, shape=[3])}, 8, "takes 12 bytes"),
        ({"x": entry(0, 8, shape=[1 << 40, 1 << 40])}, 8, "takes"),
        ({"x": entry(0, 8, dtype="F8_E4M3")}, 8, "F8_E4M3"),
        ({"x": entry(0, 8, dtype=["F32"])}, 8, "only F32, F16 and BF16"),
        ({"x": entry(0, 8, shape=[-2])}, 8, "shape"),
        ({"x": entry(0, 8, shape=[True])}, 8, "shape"),
        ({"x": entry(0, 8, shape=[1] * 9)}, 8, "shape"),
        ({"x": entry(0, 8, data_offsets=[8, 0])}, 8, "data_offsets"),
        ({"x": entry(0, 8, data_offsets=[0, 8, 9])}, 8, "data_offsets"),
        ({"x": entry(0, 8, more=1)}, 8, "nothing else"),
        ({"x": 3}, 8, "must have dtype"),
        ({"__metadata__": {"format": 1}, "x": entry(0, 8)}, 8, "__metadata__"),
        (b'{"x": 1, "x": 2}', 0, "stands twice"),
        (b"[]", 0, "isn't a JSON object"),
        (b"{", 0, "broken header"),
    ],
)
def test_a_broken_layout_is_refused_in_words(
    header: Any, body_bytes: int, words: str, tmp_path: Path
) -> None:
    found = problems(tmp_path, with_header(header, bytes(body_bytes)))
    assert any(words in problem for problem in found), found


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "only 0 bytes"),
        (b"1234567", "only 7 bytes"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "claims"),
        (struct.pack("<Q", 2**64 - 1), "claims"),
        (struct.pack("<Q", 100) + b"{}", "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
        (b"PK\x03\x04" + bytes(60), "isn't a safetensors file"),
    ],
)
def test_what_is_no_safetensors_file_is_refused_in_words(
    raw: bytes, words: str, tmp_path: Path
) -> None:
    assert words in problems(tmp_path, raw)[0]


@given(st.data())
def test_no_damage_is_beyond_words(tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    whole = bytearray(
        safetensors_bytes({"a": np.ones((2, 2), np.float32), "b": np.ones(3, np.float32)})
    )
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 17))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    path = folder / "x.safetensors"
    path.write_bytes(cut)

    reading = read_header(path)

    for tensor in () if reading.problems else reading.tensors:
        assert tensor.offset + tensor.num_bytes <= len(cut)
        tensor.read()


def test_as_the_safetensors_library_writes(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    arrays = {"z": np.ones((3, 2), np.float16), "a": np.zeros((1, 5), np.float32)}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})

    reading = read_header(tmp_path / "x.safetensors")

    assert reading.problems == ()
    assert {t.name: t.shape for t in reading.tensors} == {"z": (3, 2), "a": (1, 5)}
    assert json.dumps(sorted(t.dtype for t in reading.tensors)) == '["F16", "F32"]'
