from pathlib import Path

import numpy as np
import pytest

from adapters.validate import NO_EFFECT_TEXT, inspect_directory
from tests.adapters.worlds import (
    TINY_MODULES,
    config,
    safetensors_bytes,
    tensor_name,
    tensors,
    tiny_base,
    write_adapter,
)


def problems(folder: Path, fields: dict | None = None, arrays: dict | None = None) -> str:
    inspection = inspect_directory(write_adapter(folder, fields, arrays), tiny_base())
    assert inspection.adapter is None
    return "\n".join(inspection.problems)


def test_a_sound_adapter_is_described_module_by_module(tmp_path: Path) -> None:
    write_adapter(tmp_path, config(use_rslora=True))

    inspection = inspect_directory(tmp_path, tiny_base())

    adapter = inspection.adapter
    assert adapter is not None
    assert inspection.problems == inspection.warnings == ()
    assert [(lora.layer, lora.target) for lora in adapter.loras] == [
        (0, "q_proj"),
        (0, "v_proj"),
        (1, "q_proj"),
        (1, "v_proj"),
    ]
    assert {lora.scale for lora in adapter.loras} == {8 / 4**0.5}
    assert adapter.rows() == {"attention": 4}
    assert (adapter.max_rank, adapter.dtype) == (4, "F32")
    assert adapter.num_bytes == sum(array.nbytes for array in tensors().values())


def test_rows_are_the_largest_rank_of_each_group(tmp_path: Path) -> None:
    fields = config(target_modules=["q_proj", "up_proj"], rank_pattern={"up_proj": 7})
    arrays = tensors(("q_proj",)) | tensors(("up_proj",), rank=7)

    adapter = inspect_directory(write_adapter(tmp_path, fields, arrays), tiny_base()).adapter

    assert adapter is not None
    assert adapter.rows() == {"attention": 4, "mlp": 7}


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    arrays = tensors()
    arrays[tensor_name(0, "q_proj", "B")][0, 0] = np.nan
    arrays[tensor_name(1, "q_proj", "A")] = np.ones((4, 5), np.float32)

    found = problems(tmp_path, config(use_dora=True, brand_new=1), arrays)

    for words in ("use_dora", "brand_new", "NaN in 1 tensors", "[4, 5]"):
        assert words in found


def test_missing_weights_get_the_kindest_words(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "link_to_weights.txt").write_text("see the drive")

    (problem,) = inspect_directory(tmp_path, tiny_base()).problems

    for words in ("weights are missing", "adapter_model.safetensors", "link_to_weights.txt"):
        assert words in problem


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ("adapter_model.bin", "pickle"),
        ("adapters.safetensors", "MLX-LM"),
        ("0000790_adapters.safetensors", "MLX-LM"),
        ("adapter_model-00001-of-00002.safetensors", "shards"),
        ("weights.zip", "aren't opened"),
    ],
)
def test_what_lies_there_instead_of_the_weights_is_named(
    beside: str, words: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / beside)

    assert words in inspect_directory(tmp_path, tiny_base()).problems[0]


def test_a_pointer_instead_of_the_weights_is_named(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    )
    assert "git lfs pull" in inspect_directory(tmp_path, tiny_base()).problems[0]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "adapter_config.json is missing" in inspect_directory(tmp_path, tiny_base()).problems


@pytest.mark.parametrize(
    ("fields", "arrays", "words"),
    [
        (config(), tensors(("q_proj",)), "config targets these modules, but the weights don't"),
        (config(target_modules=["q_proj"]), tensors(), "config doesn't target these modules"),
        (config(), tensors(layers=range(1)), "config targets these modules, but the weights"),
        (config(), tensors(layers=range(3)), "trained on another base"),
        (config(r=8), tensors(), "the rank want [8, 16]"),
        (config(target_modules=["xxx"]), tensors(), "names no linear module"),
        (config(target_modules=[]), tensors(), "an empty list"),
        (config(target_modules="(q_proj"), tensors(), "isn't a regular expression"),
        (config(rank_pattern={"q_proj[": 4}), tensors(), "isn't a regular expression"),
        (config(target_modules=["q_proj", "v_proj", "lm_head"]), tensors(), "lm_head"),
        (config(), {}, "holds no tensors"),
    ],
)
def test_config_and_weights_must_agree(
    fields: dict, arrays: dict, words: str, tmp_path: Path
) -> None:
    assert words in problems(tmp_path, fields, arrays)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("base_model.model.model.layers.0.mlp.qkv_proj.lora_A.weight", "no such module"),
        ("base_model.model.model.layers.0.mlp.q_proj.lora_A.weight", "no such module"),
        ("base_model.model.model.layers.00.self_attn.k_proj.lora_A.weight", "malformed"),
        ("base_model.model.lm_head.lora_A.weight", "lm_head"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embed_tokens"),
        ("base_model.model.model.embed_tokens.weight", "embed_tokens"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "biases"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", "name stands"),
        ("base_model.model.model.layers.0.self_attn.q_proj.ia3_l", "aren't lora_A"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "start with"),
        ("base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight", "vision"),
        ("base_model.model.layers.0.self_attn.k_proj.lora_A.weight", "two different saves"),
    ],
)
def test_a_tensor_that_cannot_be_applied_is_named(name: str, words: str, tmp_path: Path) -> None:
    arrays = tensors() | {name: np.ones((4, 16), np.float32)}
    assert words in problems(tmp_path, None, arrays)


@pytest.mark.parametrize("side", ["A", "B"])
def test_half_a_module_is_refused(side: str, tmp_path: Path) -> None:
    arrays = tensors()
    del arrays[tensor_name(1, "v_proj", side)]
    assert f"lora_{side} is missing for: model.layers.1.self_attn.v_proj" in problems(
        tmp_path, None, arrays
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("dtype", "written"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")]
)
def test_a_value_that_is_no_number_is_found_anywhere(
    value: float, dtype: str, written: str, tmp_path: Path
) -> None:
    arrays = tensors()
    arrays[tensor_name(1, "v_proj", "B")][-1, -1] = value
    if dtype == "bfloat16":
        stored = {n: (a.view(np.uint32) >> 16).astype(np.uint16) for n, a in arrays.items()}
    else:
        stored = {n: a.astype(dtype) for n, a in arrays.items()}
    write_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors_bytes(stored, written))

    found = inspect_directory(tmp_path, tiny_base()).problems

    kind = "NaN" if np.isnan(value) else "infinity"
    assert found == (f"{kind} in 1 tensors: {tensor_name(1, 'v_proj', 'B')}",)


def test_an_adapter_of_zeros_has_no_effect(tmp_path: Path) -> None:
    arrays = {n: a * (".lora_A." in n) for n, a in tensors().items()}
    inspection = inspect_directory(write_adapter(tmp_path, None, arrays), tiny_base())
    assert inspection.has_no_effect


def test_minus_zero_is_zero(tmp_path: Path) -> None:
    arrays = {n: a * np.float32(0) * -1 if "_B" in n else a for n, a in tensors().items()}
    inspection = inspect_directory(write_adapter(tmp_path, None, arrays), tiny_base())
    assert inspection.has_no_effect


def test_some_modules_of_zeros_are_a_warning(tmp_path: Path) -> None:
    arrays = tensors()
    arrays[tensor_name(0, "q_proj", "B")][:] = 0
    inspection = inspect_directory(write_adapter(tmp_path, None, arrays), tiny_base())
    assert inspection.adapter is not None
    assert "1 of 4 modules" in inspection.warnings[0]


def test_an_adapter_wider_than_the_arena_is_refused_with_both_numbers(tmp_path: Path) -> None:
    base = tiny_base(lora_rows={"attention": 3, "mlp": 9})
    (problem,) = inspect_directory(write_adapter(tmp_path), base).problems
    assert "rank in the attention group is 4" in problem
    assert "3 rank rows" in problem


def test_an_arena_just_wide_enough_is_enough(tmp_path: Path) -> None:
    base = tiny_base(lora_rows={"attention": 4, "mlp": 9})
    assert inspect_directory(write_adapter(tmp_path), base).adapter is not None


@pytest.mark.parametrize("folder", ["someone/", "/models/", "C:\\models\\", ""])
def test_the_same_base_under_another_owner_or_folder_is_no_warning(
    tmp_path: Path, folder: str
) -> None:
    name = tiny_base().base_id.upper()
    write_adapter(tmp_path, config(base_model_name_or_path=folder + name))

    assert inspect_directory(tmp_path, tiny_base()).warnings == ()


def test_another_base_name_is_a_warning_and_another_class_a_refusal(tmp_path: Path) -> None:
    write_adapter(tmp_path, config(base_model_name_or_path="C:\\models\\x"))
    inspection = inspect_directory(tmp_path, tiny_base())
    assert inspection.adapter is not None
    assert "names prove little" in inspection.warnings[0]

    mapping = {"base_model_class": "LlamaBiModel", "parent_library": "llm2vec"}
    assert "LlamaBiModel" in problems(tmp_path, config(auto_mapping=mapping))


def test_a_base_of_other_widths_is_refused_by_shapes(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    wide = {
        name: type(shape)(in_features=shape.in_features * 2, out_features=shape.out_features)
        for name, shape in TINY_MODULES.items()
    }
    found = inspect_directory(tmp_path, tiny_base(modules=wide)).problems
    assert "q_proj's lora_A has shape [4, 16] where the base and the rank want [4, 32]" in found[0]


def test_an_endless_expression_is_given_up_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.patterns.MATCH_TIMEOUT_S", 0.5)
    fields = config(target_modules=r"(([a-z_.0-9]+)*)*!")
    assert "takes too long" in problems(tmp_path, fields)


def test_a_giant_expression_is_refused(tmp_path: Path) -> None:
    assert "characters" in problems(tmp_path, config(target_modules="q" * 5000))


def test_a_list_of_five_thousand_targets_is_read(tmp_path: Path) -> None:
    fields = config(target_modules=["q_proj", "v_proj", *(f"t{i}" for i in range(5000))])
    inspection = inspect_directory(write_adapter(tmp_path, fields), tiny_base())
    assert inspection.adapter is not None
    assert len(inspection.notes) == 1


def test_problems_are_fit_to_be_shown(tmp_path: Path) -> None:
    arrays = tensors() | {"\x1b[2J\n": np.ones(1, np.float32)}
    assert "\x1b" not in problems(tmp_path, None, arrays)


def test_a_flood_of_problems_is_cut(tmp_path: Path) -> None:
    fields = config(**{f"unknown_{number}": 1 for number in range(5000)})
    write_adapter(tmp_path, fields)
    found = inspect_directory(tmp_path, tiny_base()).problems
    assert len(found) == 101
    assert found[-1] == "and 4900 more"


def cancelling(*, one_module_only: bool) -> dict[str, np.ndarray]:
    """Neither A nor B has a zero, but B times A is zero: two ranks that take each other away."""
    arrays = tensors(rank=2)
    for layer, target in ((0, "q_proj"), (0, "v_proj"), (1, "q_proj"), (1, "v_proj")):
        a = arrays[tensor_name(layer, target, "A")]
        b = arrays[tensor_name(layer, target, "B")]
        a[1], b[:, 1] = a[0], -b[:, 0]
        if one_module_only:
            break
    return arrays


def test_factors_that_cancel_out_are_no_effect(tmp_path: Path) -> None:
    fields = config(r=2)
    silent = write_adapter(tmp_path / "a", fields, cancelling(one_module_only=False))
    partly = write_adapter(tmp_path / "b", fields, cancelling(one_module_only=True))

    assert inspect_directory(silent, tiny_base()).has_no_effect
    inspection = inspect_directory(partly, tiny_base())
    assert inspection.adapter is not None
    assert any("B times A is zero in 1 of 4 modules" in text for text in inspection.warnings)


def test_a_deliberate_no_op_is_a_warning(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, config(r=2), cancelling(one_module_only=False))
    inspection = inspect_directory(folder, tiny_base(), allow_no_effect=True)
    assert inspection.adapter is not None
    assert NO_EFFECT_TEXT in inspection.warnings


def test_tiny_factors_are_an_effect(tmp_path: Path) -> None:
    """Whether the base's number format swallows them is for the probe to see."""
    arrays = {name: array * np.float32(1e-18) for name, array in tensors().items()}
    inspection = inspect_directory(write_adapter(tmp_path, None, arrays), tiny_base())
    assert inspection.adapter is not None
    assert not any("zero" in text for text in inspection.warnings)
