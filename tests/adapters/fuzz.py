"""Seeded mutations of configs that people upload and of headers that PEFT writes."""

import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

WORDS: list[Any] = [
    None, True, False, 0, -1, 1, 4, 2**31, 2**63, -(2**64), 10**30, 10**400, 0.5, -0.0, 1e-320,
    1e308, "", "q_proj", "a" * 5000, ".*", "(", "[", "(?P<x>", "(a+)+!", r"\d", "(?i)", "x{99999}",
    "all-linear", "ALL-LINEAR", "LORA", "lora", "\x00", "\u202e", "é" * 300, "../../etc/passwd",
    "/etc/passwd", "__class__", "${jndi:x}", "%s%n", [], {}, [[]], [None], ["q_proj", 3], {"": ""},
    {"q_proj": 0}, {"q_proj": {}}, [0], [-1], [2**40], ["q_proj"] * 50, {"base_model_class": []},
]  # fmt: skip
KEYS = [
    "r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern",
    "layers_to_transform", "layers_pattern", "use_rslora", "use_dora", "bias", "peft_type",
    "task_type", "auto_mapping", "base_model_name_or_path", "init_lora_weights", "modules_to_save",
    "fan_in_fan_out", "inference_mode", "peft_version", "", "\x00", "__proto__", "k" * 3000,
]  # fmt: skip
BLOCKS = [
    b"", b"\x00", b"\xff", b"\xef\xbb\xbf", b'"', b"{", b"}", b"[" * 40, b"[" * 3000, b"NaN",
    b"1e999", b"-Infinity", b"\\ud800", b"\\u0000", b",,", b"//", b"9" * 5000, b'"a":1,"a":2',
    b"\r\n\r\n",
]  # fmt: skip
Random = random.Random


def mutated_config(raw: bytes, rng: Random, *, others: Sequence[bytes]) -> bytes:
    """Return the config changed in its values, or in its bytes, or in both."""
    if rng.random() < 0.75:
        try:
            value = json.loads(raw)
        except ValueError:
            value = {}
        for _ in range(rng.randint(1, 4)):
            value = changed_value(value, rng)
        raw = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    if rng.random() < 0.4:
        raw = changed_bytes(raw, rng, others=others)
    return raw


def mutated_weights(raw: bytes, rng: Random) -> bytes:
    """Return a safetensors file with a header that lies, or with bytes that are damaged."""
    length = int.from_bytes(raw[:8], "little")
    text, body = raw[8 : 8 + length], raw[8 + length :]
    if rng.random() < 0.75:
        header = json.loads(text)
        for _ in range(rng.randint(1, 3)):
            change_header(header, rng)
        text = json.dumps(header).encode()
    if rng.random() < 0.3:
        text = changed_bytes(text, rng, others=[raw])
    if rng.random() < 0.3:
        body = changed_bytes(body, rng, others=[text])
    claimed = len(text) if rng.random() < 0.85 else rng.choice([0, 1, 2**24, 2**63, len(text) + 8])
    return struct.pack("<Q", claimed) + text + body


def changed_value(value: Any, rng: Random) -> Any:
    """Replace, add, drop, rename or nest something somewhere in a JSON value."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.05:
        return rng.choice([*WORDS, [value], {"a": value}])
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], changed_value(value[at], rng), *value[at + rng.randint(0, 1) :]]
    changed = dict(value)
    key = rng.choice(list(value))
    what = rng.randrange(5)
    if what == 0:
        del changed[key]
    elif what == 1:
        changed[rng.choice(KEYS)] = rng.choice(WORDS)
    elif what == 2:
        changed[rng.choice([*KEYS, key + "x"])] = changed.pop(key)
    elif what == 3:
        changed[key] = nested(value[key], rng.choice([3, 30, 40, 200]))
    else:
        changed[key] = changed_value(value[key], rng)
    return changed


def nested(value: Any, depth: int) -> Any:
    for level in range(depth):
        value = [value] if level % 2 else {"n": value}
    return value


def changed_bytes(raw: bytes, rng: Random, *, others: Sequence[bytes]) -> bytes:
    """Flip, cut, repeat or insert bytes."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(raw))
        end = min(len(raw), at + rng.choice([0, 1, 4, 60]))
        other = rng.choice(others)
        piece = rng.choice([*BLOCKS, rng.randbytes(3), raw[at:end] * 3, other[at : at + 50]])
        raw = raw[:at] + piece + raw[end:]
    return raw[: rng.randint(0, len(raw))] if rng.random() < 0.1 else raw


def change_header(header: dict[str, Any], rng: Random) -> None:
    """Let one tensor lie in the ways that a reader could believe."""
    name = rng.choice(list(header))
    entry = header[name]
    if not isinstance(entry, dict) or not entry or rng.random() < 0.2:
        header[rng.choice([name, *KEYS])] = changed_value(entry, rng)
        return
    changes: list[Callable[[], object]] = [
        lambda: entry.update(dtype=rng.choice(["F16", "BF16", "F64", "I8", "F8_E4M3", "", None])),
        lambda: entry.update(shape=[rng.choice([0, 1, 3, -1, 2**47, 2**70, 1.5]) for _ in "ab"]),
        lambda: entry.update(data_offsets=[rng.choice([0, 8, 2**40, -8, 2**64]) for _ in "ab"]),
        lambda: entry.update(shape=[1] * rng.randint(0, 12)),
        lambda: header.update({name + rng.choice(KEYS): header.pop(name)}),
        lambda: header.update({name.replace("lora_A", "lora_B"): entry}),
        lambda: header.update({name.replace("layers.0", "layers.99999999999"): header.pop(name)}),
        lambda: entry.pop(rng.choice(list(entry)), None),
        lambda: entry.update({rng.choice(KEYS): rng.choice(WORDS)}),
    ]
    rng.choice(changes)()
