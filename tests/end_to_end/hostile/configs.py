"""Configs that nobody's PEFT has written."""

import json
from typing import Any

from tests.end_to_end.hostile.case import CONFIG, Case, files_case


def raw_case(name: str, words: str, raw: bytes) -> Case:
    def replace(files: dict[str, bytes]) -> None:
        files[CONFIG] = raw

    return files_case(f"config {name}", words, replace)


def field_case(name: str, words: str, **fields: Any) -> Case:
    def change(files: dict[str, bytes]) -> None:
        files[CONFIG] = json.dumps(json.loads(files[CONFIG]) | fields).encode()

    return files_case(f"config {name}", words, change)


def text_case(name: str, words: str, old: bytes, new: bytes) -> Case:
    """Change the text itself, for what no JSON writer writes."""

    def change(files: dict[str, bytes]) -> None:
        assert old in files[CONFIG]
        files[CONFIG] = files[CONFIG].replace(old, new)

    return files_case(f"config {name}", words, change)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


NUMBERS = [
    field_case("of rank 0", "r must be", r=0),
    field_case("of rank -4", "r must be", r=-4),
    field_case("of a huge rank", "r must be", r=10**12),
    field_case("of rank true", "r must be", r=True),
    field_case("of rank 4.5", "r must be", r=4.5),
    field_case("whose rank is text", "r must be", r="4; DROP TABLE"),
    field_case("whose alpha is text", "lora_alpha must be", lora_alpha="eight"),
    field_case("whose alpha is zero", "lora_alpha must be", lora_alpha=0),
    field_case("whose alpha is huge", "lora_alpha must be", lora_alpha=10**40),
    text_case("whose alpha is NaN", "nan isn't a json", b'"lora_alpha": 8', b'"lora_alpha": NaN'),
    text_case(
        "whose alpha is infinite", "infinity isn't", b'"lora_alpha": 8', b'"lora_alpha": -Infinity'
    ),
    text_case(
        "whose alpha is 1e400", "lora_alpha must be", b'"lora_alpha": 8', b'"lora_alpha": 1e400'
    ),
    text_case("with a number of 5000 digits", "isn't json", b'"r": 4', b'"r": ' + b"9" * 5000),
]
FEATURES = [
    field_case("with an unknown field", "brand_new_trick", brand_new_trick=0.5),
    field_case("with a gigantic key", "kkkkkkkk", **{"k" * 500_000: 1}),
    field_case("with many unknown fields", "and", **{f"unknown_{n}": n for n in range(20_000)}),
    field_case("that nests deeply", "nested deeper", extra=nested(900)),
    field_case("with DoRA", "use_dora", use_dora=True),
    field_case("with trained biases", "bias is", bias="all"),
    field_case("with whole modules", "modules_to_save", modules_to_save=["lm_head"]),
    field_case("of another task", "task_type", task_type="SEQ_CLS"),
    field_case("of another method", "peft_type", peft_type="LOHA"),
    field_case("of a changed base", "init_lora_weights", init_lora_weights="pissa"),
    field_case(
        "of another class", "auto_mapping names", auto_mapping={"base_model_class": "Gemma" * 99}
    ),
    field_case("with code to import", "auto_mapping", auto_mapping="os.system"),
]
PATTERNS = [
    field_case("with a regex bomb", "takes too long", target_modules=r"(([a-z_.0-9]+)*)*!"),
    field_case("with a broken regex", "isn't a regular expression", target_modules="(q_proj"),
    field_case("with a regex of a megabyte", "characters", target_modules="q" * 900_000),
    field_case("with a bomb in rank_pattern", "takes too", rank_pattern={r"((\.|\w)+)+!": 4}),
    field_case(
        "with a regex that counts", "names no linear", target_modules=r"(?:(?:q{9999}){9999}){9999}"
    ),
    field_case(
        "with ten thousand targets", "at most 8192", target_modules=[f"t{n}" for n in range(10_000)]
    ),
    field_case(
        "with three thousand patterns",
        "at most 2048",
        alpha_pattern={f"t{n}": 4 for n in range(3000)},
    ),
    field_case("with no targets", "names no linear module", target_modules=[]),
    field_case("whose targets are numbers", "target_modules must be", target_modules=[1, 2]),
    field_case("with a negative layer", "layers_to_transform", layers_to_transform=[-1]),
]
CASES = [
    raw_case("that is empty", "isn't json", b""),
    raw_case("that is a list", "one json object", b"[1]"),
    raw_case("of brackets alone", "nested deeper", b"[" * 100_000),
    raw_case("with comments", "isn't json", b"// mine\n{}"),
    raw_case("with a trailing comma", "isn't json", b'{"peft_type": "LORA",}'),
    raw_case("with two byte-order marks", "isn't json", b"\xef\xbb\xbf" * 2 + b"{}"),
    raw_case("in UTF-16", "isn't utf-8", '{"r": 4}'.encode("utf-16")),
    raw_case("with half a character", "half a character", b'{"a": "\\ud800"}'),
    raw_case("with a broken byte", "isn't utf-8", b'{"peft_type": "LORA\xff"}'),
    raw_case("that is too long", "at most 1048576", b" " * (2 << 20)),
    raw_case("of null bytes", "isn't json", bytes(5000)),
    raw_case("that is an LFS pointer", "git lfs pull",
             b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"),
    text_case("that repeats a key", "stands twice", b'"r": 4', b'"r": 4, "r": 64'),
    *NUMBERS,
    *FEATURES,
    *PATTERNS,
]  # fmt: skip
