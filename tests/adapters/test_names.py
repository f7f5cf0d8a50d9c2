import pytest

from adapters.errors import AdapterNameInvalid
from adapters.names import (
    ModelName,
    adapter_name_from_lora_name,
    check_adapter_name,
    check_alias,
    parse_model_name,
    split_model_name,
)

BASES = ["qwen", "qwen:7b", "org/llama@1"]
ADAPTERS = {"json": "qwen:7b", "pirate": "qwen", "law.v2-x_1": "org/llama@1"}


@pytest.mark.parametrize("name", ["a", "A9._-", "0", "x" * 128, "v3", "default"])
def test_a_plain_name_is_allowed(name: str) -> None:
    assert check_adapter_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".a", "-a", "a/b", "a:b", "a@b", "a b", "ä", "x" * 129, "a\n"]
)
def test_any_other_name_is_refused(name: str) -> None:
    with pytest.raises(AdapterNameInvalid):
        check_adapter_name(name)
    with pytest.raises(AdapterNameInvalid):
        check_alias(name)


@pytest.mark.parametrize("alias", ["v1", "v007"])
def test_a_version_number_is_no_alias(alias: str) -> None:
    with pytest.raises(AdapterNameInvalid, match="version by its number"):
        check_alias(alias)


@pytest.mark.parametrize("alias", ["v", "v1a", "prod", "canary", "default"])
def test_other_words_are_aliases(alias: str) -> None:
    assert check_alias(alias) == alias


DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("qwen", ("qwen", None, None)),
        ("qwen:7b", ("qwen:7b", None, None)),
        ("qwen:7b:json", ("qwen:7b", "json", None)),
        ("qwen:pirate", ("qwen", "pirate", None)),
        ("qwen:pirate@v3", ("qwen", "pirate", "v3")),
        ("pirate@prod", ("qwen", "pirate", "prod")),
        (f"pirate@{DIGEST}", ("qwen", "pirate", DIGEST)),
        (f"qwen:7b:json@{DIGEST[:19]}", ("qwen:7b", "json", DIGEST[:19])),
        ("org/llama@1", ("org/llama@1", None, None)),
        ("org/llama@1:law.v2-x_1@v2", ("org/llama@1", "law.v2-x_1", "v2")),
        ("json", ("qwen:7b", "json", None)),
    ],
)
def test_a_model_name_is_resolved_by_the_longest_known_base(model: str, expected: tuple) -> None:
    base_id, adapter_name, version_ref = expected
    assert parse_model_name(model, BASES, ADAPTERS) == ModelName(
        base_id=base_id, adapter_name=adapter_name, version_ref=version_ref
    )


@pytest.mark.parametrize(
    "model",
    ["", "gpt", "qwen:", "qwen:json", "qwen:7b:pirate", "qwen:pirate@", "json@sha256:12", "qwen@v1",
     ":json", "qwen:7b:json:x", "json@a@b", "other:json"],
)  # fmt: skip
def test_what_is_unknown_is_never_a_fall_back(model: str) -> None:
    assert parse_model_name(model, BASES, ADAPTERS) is None


def test_splitting_needs_no_list_of_adapters() -> None:
    assert split_model_name("new@v1", BASES) == ModelName(
        base_id=None, adapter_name="new", version_ref="v1"
    )


def test_a_slash_in_a_vllm_name_is_mapped() -> None:
    assert adapter_name_from_lora_name("org/my-lora") == "org--my-lora"
    with pytest.raises(AdapterNameInvalid):
        adapter_name_from_lora_name("a b")
