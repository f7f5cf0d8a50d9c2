import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.limits import MAX_CONFIG_BYTES
from adapters.peft_config import read_config
from tests.adapters.worlds import config


def problems(**changes: Any) -> tuple[str, ...]:
    return read_config(json.dumps(config(**changes)).encode()).problems


def test_missing_fields_have_pefts_defaults() -> None:
    reading = read_config(b'{"peft_type": "LORA"}')
    assert reading.config is not None
    assert (reading.config.lora_rank, reading.config.lora_alpha) == (8, 8)
    assert reading.config.target_modules == ("q_proj", "v_proj")
    assert any("target_modules is missing" in note for note in reading.notes)


@pytest.mark.parametrize("value", [None, False, {}, []])
def test_an_unknown_field_that_holds_nothing_is_accepted_and_noted(value: Any) -> None:
    reading = read_config(json.dumps(config(brand_new=value)).encode())
    assert reading.problems == ()
    assert any("brand_new" in note for note in reading.notes)


@pytest.mark.parametrize("value", [True, 0, 1, "", "x", {"a": 1}, [0]])
def test_an_unknown_field_that_holds_something_is_refused_by_name(value: Any) -> None:
    assert any("brand_new" in problem for problem in problems(brand_new=value))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_dropout", 0.3),
        ("inference_mode", False),
        ("loftq_config", {"loftq_bits": 4}),
        ("megatron_core", "megatron.core"),
        ("qalora_group_size", 16),
        ("peft_version", "9.9"),
        ("revision", "main"),
        ("eva_config", {"rho": 2.0}),
        ("init_lora_weights", False),
        ("init_lora_weights", "gaussian"),
        ("init_lora_weights", "eva"),
        ("init_lora_weights", "orthogonal"),
        ("layers_pattern", []),
        ("modules_to_save", []),
        ("lora_alpha", 16.0),
    ],
)
def test_a_field_that_only_concerns_training_never_decides(field: str, value: Any) -> None:
    assert problems(**{field: value}) == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", True),
        ("r", 8.0),
        ("r", "8"),
        ("lora_alpha", 0),
        ("lora_alpha", "16"),
        ("lora_alpha", True),
        ("use_rslora", 1),
        ("use_dora", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]),
        ("layer_replication", [[0, 1]]),
        ("alora_invocation_tokens", [1]),
        ("target_parameters", ["x"]),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", 1),
        ("init_lora_weights", ["pissa"]),
        ("task_type", "SEQ_CLS"),
        ("task_type", ["CAUSAL_LM"]),
        ("target_modules", 3),
        ("target_modules", [["q_proj"]]),
        ("exclude_modules", 3),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", ["q_proj"]),
        ("alpha_pattern", {"q_proj": "8"}),
        ("layers_to_transform", [-1]),
        ("layers_to_transform", True),
        ("layers_pattern", "layers"),
        ("auto_mapping", "LlamaForCausalLM"),
        ("base_model_name_or_path", 3),
        ("enable_lora", [True]),
        ("use_bdlora", {"nblocks": 2}),
        ("kasa_config", {"a": 1}),
        ("peft_type", "LOHA"),
        ("peft_type", None),
    ],
)
def test_a_field_that_is_not_served_is_refused_by_name(field: str, value: Any) -> None:
    found = problems(**{field: value})
    assert any(field in problem for problem in found), found


def test_all_problems_are_listed_at_once() -> None:
    found = problems(use_dora=True, bias="all", r=-1, brand_new=7)
    for name in ("use_dora", "bias", "r must be", "brand_new"):
        assert any(name in problem for problem in found), (name, found)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "isn't JSON"),
        (b"{", "isn't JSON"),
        (b"// a comment\n{}", "isn't JSON"),
        (b"[]", "must hold one JSON object"),
        (b'{"r": 1, "r": 2}', "stands twice"),
        (b'{"lora_alpha": NaN}', "NaN"),
        (b'{"a": "\\udcff"}', "half a character"),
        (b"\xff\xfe{}", "UTF-8"),
        (b"[" * 100_000, "nested deeper than"),
        (b'{"r": ' + b"9" * 5000 + b"}", "isn't JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), "at most"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
    ids=range(12),
)
def test_what_is_no_config_is_refused_in_words(raw: bytes, words: str) -> None:
    reading = read_config(raw)
    assert reading.config is None
    assert words in reading.problems[0]


def test_a_byte_order_mark_is_no_reason_to_refuse() -> None:
    assert read_config(b"\xef\xbb\xbf" + json.dumps(config()).encode()).problems == ()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = [
    *sorted(config()),
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
    "exclude_modules",
    "init_lora_weights",
    "auto_mapping",
    "bias",
    "use_rslora",
]


@given(st.dictionaries(st.sampled_from(_FIELDS) | st.text(), _JSON, max_size=6))
def test_no_config_is_beyond_words(changes: dict[str, Any]) -> None:
    reading = read_config(json.dumps(config() | changes).encode())
    assert reading.config is not None or reading.problems
