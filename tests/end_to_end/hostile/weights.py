"""Weights that lie about themselves, or don't fit."""

import json
import pickle
import struct
from collections.abc import Callable
from typing import Any

from safetensors.numpy import load, save

from tests.end_to_end.hostile.case import CONFIG, WEIGHTS, Case, files_case

Header = dict[str, Any]
Arrays = dict[str, Any]


def bytes_case(name: str, words: str, change: Callable[[bytes], bytes]) -> Case:
    def replace(files: dict[str, bytes]) -> None:
        files[WEIGHTS] = change(files[WEIGHTS])

    return files_case(f"weights {name}", words, replace)


def header_case(name: str, words: str, change: Callable[[Header, str], object]) -> Case:
    """Change the header's JSON; `change` is also given the name of one tensor."""

    def rewrite(raw: bytes) -> bytes:
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header, first(header))
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + raw[8 + length :]

    return bytes_case(name, words, rewrite)


def array_case(name: str, words: str, change: Callable[[Arrays, str], object]) -> Case:
    """Change the arrays; `change` is also given the name of one A."""

    def rewrite(raw: bytes) -> bytes:
        arrays = {key: array.copy() for key, array in load(raw).items()}
        change(arrays, first(arrays))
        return save(arrays)

    return bytes_case(name, words, rewrite)


def first(named: dict[str, Any]) -> str:
    return min(name for name in named if "layers.0" in name and "lora_A" in name)


def text_case(name: str, words: str, text: bytes) -> Case:
    return bytes_case(name, words, lambda _: struct.pack("<Q", len(text)) + text)


def fill(part: str, value: float) -> Callable[[Arrays, str], None]:
    def change(arrays: Arrays, _: str) -> None:
        for name in arrays:
            if part in name:
                arrays[name][:] = value

    return change


def rename(old: str, new: str) -> Callable[[Arrays, str], None]:
    def change(arrays: Arrays, _: str) -> None:
        for name in [name for name in arrays if old in name]:
            arrays[name.replace(old, new)] = arrays.pop(name)

    return change


def swap_offsets(header: Header, name: str) -> None:
    header[name]["data_offsets"].reverse()


def overlap(header: Header, name: str) -> None:
    """Let the tensor reach to the end of the one behind it."""
    begin, end = header[name]["data_offsets"]
    rows, columns = header[name]["shape"]
    header[name] |= {"shape": [2 * rows, columns], "data_offsets": [begin, 2 * end - begin]}


def shape(*extents: object) -> Callable[[Header, str], None]:
    return lambda header, name: header[name].update(shape=list(extents))


def transpose(arrays: Arrays, name: str) -> None:
    arrays[name] = arrays[name].T.copy()


def poison(value: float) -> Callable[[Arrays, str], None]:
    def change(arrays: Arrays, name: str) -> None:
        arrays[name][0, 0] = value

    return change


def widen(files: dict[str, bytes]) -> None:
    files[CONFIG] = files[CONFIG].replace(b'"r": 4', b'"r": 64')


CASES = [
    bytes_case("that are empty", "only 0 bytes", lambda _: b""),
    bytes_case("cut in the middle", "truncated", lambda raw: raw[: len(raw) // 2]),
    bytes_case("cut in the header", "truncated", lambda raw: raw[:100]),
    bytes_case("with bytes behind", "belong to none", lambda raw: raw + b"evil"),
    bytes_case("whose header claims 2^64", "claims", lambda raw: b"\xff" * 8 + raw[8:]),
    bytes_case("whose header claims too little", "broken", lambda raw: b"\x09" + raw[1:]),
    bytes_case("that are a pickle", "isn't a safetensors", lambda _: pickle.dumps([1] * 50)),
    bytes_case("that are a GGUF", "safetensors", lambda _: b"GGUF" + bytes([3] * 90)),
    bytes_case("that are an LFS pointer", "git lfs", lambda _: b"version https://git-lfs.github."),
    text_case("whose header is a list", "isn't a JSON object", b"[]"),
    text_case("whose header is garbage", "broken header", b"\xfe\xed"),
    text_case("whose header nests deeply", "nested deeper", b'{"a":' * 5000),
    text_case("whose header repeats a key", "stands twice", b'{"a": 1, "a": 2}'),
    text_case("whose header is empty", "holds no tensors", b"{}"),
    text_case("with a gigantic tensor name", "must have", b'{"' + b"n" * (1 << 20) + b'": 1}'),
    text_case(
        "with a hundred thousand wrong tensors",
        "more",
        b"{" + b", ".join(b'"t%d": 0' % n for n in range(100_000)) + b"}",
    ),
    header_case("that overlap", "overlaps", overlap),
    header_case("with offsets reversed", "begin and an end", swap_offsets),
    header_case("with a negative shape", "whole numbers", shape(-4, -64)),
    header_case("with a boolean shape", "whole numbers", shape(True, 256)),
    header_case("with a shape of 2^80", "takes", shape(1 << 40, 1 << 40)),
    header_case("with a fractional shape", "whole numbers", shape(4.0, 64)),
    header_case("with a shape of another length", "takes", shape(4, 63)),
    header_case("with a dtype that lies", "takes", lambda h, n: h[n].update(dtype="F16")),
    header_case("with a dtype of integers", "only F32", lambda h, n: h[n].update(dtype="I32")),
    header_case("with a dtype of objects", "only F32", lambda h, n: h[n].update(dtype={})),
    header_case("with a stray key", "nothing else", lambda h, n: h[n].update(device="cuda")),
    header_case("with metadata that is no text", "__metadata__", lambda h, _: h.update(
        __metadata__={"a": [1]})),
    array_case("with a NaN", "nan in 1 tensors", poison(float("nan"))),
    array_case("with an infinity", "infinity in 1", poison(float("-inf"))),
    array_case("whose B is all zeros", "no effect", fill("lora_B", 0.0)),
    array_case("whose A is all zeros", "no effect", fill("lora_A", 0.0)),
    array_case("with a transposed factor", "has shape", transpose),
    array_case("without one B", "lora_B is missing", lambda a, n: a.pop(
        n.replace("lora_A", "lora_B"))),
    array_case("without one module", "don't have them", lambda a, n: (
        a.pop(n), a.pop(n.replace("lora_A", "lora_B")))),
    array_case("of a module that isn't", "no such module", rename("q_proj", "in_proj")),
    array_case("of a layer that isn't", "has 4 layers", rename("layers.3.", "layers.99.")),
    array_case("of a layer spelt oddly", "malformed", rename("layers.3.", "layers.03.")),
    array_case("of a vision model", "vision", rename("model.layers", "vision.layers")),
    array_case("named without PEFT's prefix", "start with", rename("base_model.model.", "")),
    array_case("with a module of their own", "doesn't target", rename("v_proj", "k_proj")),
    files_case("weights of another rank", "where the base and the rank want [64", widen),
]  # fmt: skip
