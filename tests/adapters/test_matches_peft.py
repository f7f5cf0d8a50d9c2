"""PEFT itself is the oracle: what it saves is read with the ranks and scales it computes with."""

import json
from pathlib import Path

import numpy as np
import pytest

from adapters.base_description import BaseDescription
from adapters.peft_format import TensorRef
from adapters.validate import inspect_directory
from tests.adapters.worlds import HIDDEN, KV, MLP, NUM_LAYERS, tiny_base

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

# PEFT asks transformers for things that it has deprecated, and warns of the settings tried here.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def base() -> BaseDescription:
    return tiny_base()


def tiny_llama() -> "transformers.LlamaForCausalLM":
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=HIDDEN,
            intermediate_size=MLP,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=HIDDEN // (KV // 2),
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def save_with_peft(folder: Path, *, dtype: "torch.dtype" = torch.float32, **settings) -> dict:
    """Save a random adapter; returns PEFT's own (rank, scaling, A, B) by module name."""
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder)
    assert (folder / "adapter_model.safetensors").is_file()
    loaded = peft.PeftModel.from_pretrained(tiny_llama(), folder, autocast_adapter_dtype=False)
    return {
        name.removeprefix("base_model.model."): (
            module.r["default"],
            module.scaling["default"],
            module.lora_A["default"].weight.detach().float().numpy(),
            module.lora_B["default"].weight.detach().float().numpy(),
        )
        for name, module in loaded.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


def values(tensor: TensorRef) -> np.ndarray:
    raw = tensor.read()
    if tensor.dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all seven": {"r": 4, "lora_alpha": 16, "target_modules": ALL},
    "all-linear": {"r": 2, "lora_alpha": 3, "target_modules": "all-linear"},
    "rank-stabilised": {"r": 9, "lora_alpha": 6, "use_rslora": True, "target_modules": ALL},
    "PEFT's own targets": {"r": 4},
    "regular expression": {
        "r": 4,
        "target_modules": r".*\.(self_attn|mlp)\.(q_proj|up_proj)",
    },
    "regular expression with a layer": {"r": 4, "target_modules": r"model\.layers\.1\..*_proj"},
    "one layer": {"r": 4, "target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]},
    "a bare layer number": {"r": 4, "target_modules": ["down_proj"], "layers_to_transform": 0},
    "layers pattern": {
        "r": 4,
        "target_modules": ["q_proj"],
        "layers_to_transform": [0],
        "layers_pattern": "layers",
    },
    "excluded by name": {"r": 4, "target_modules": ALL, "exclude_modules": ["v_proj"]},
    "excluded by expression": {
        "r": 4,
        "target_modules": "all-linear",
        "exclude_modules": r".*layers\.0\..*",
    },
    "a module in full": {"r": 4, "target_modules": ["model.layers.0.self_attn.q_proj", "k_proj"]},
    "rank pattern": {"r": 4, "target_modules": ALL, "rank_pattern": {"q_proj": 2, "mlp.*": 8}},
    "anchored rank pattern": {
        "r": 4,
        "target_modules": ALL,
        "rank_pattern": {"^model.layers.1.self_attn.q_proj": 2, "q_proj": 3},
    },
    "first matching pattern": {
        "r": 4,
        "target_modules": ALL,
        "rank_pattern": {r"layers\.\d+\.self_attn\..*": 6, "q_proj": 2},
    },
    "alpha pattern": {
        "r": 16,
        "lora_alpha": 32,
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"layers.1.self_attn.v_proj": 8},
    },
    "patterns and rank-stabilised": {
        "r": 4,
        "lora_alpha": 32,
        "use_rslora": True,
        "target_modules": ALL,
        "rank_pattern": {"down_proj": 16},
        "alpha_pattern": {"(up|down)_proj": 5},
    },
    "pattern that is only a suffix of a name": {
        "r": 4,
        "target_modules": ALL,
        "rank_pattern": {"proj": 2, "_proj": 3},
    },
    "PiSSA converted, gaussian start": {
        "r": 4,
        "target_modules": ["q_proj"],
        "init_lora_weights": "gaussian",
    },
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_ranks_scales_and_weights_are_those_that_peft_computes_with(
    settings: dict, tmp_path: Path, base: BaseDescription
) -> None:
    oracle = save_with_peft(tmp_path, **settings)

    inspection = inspect_directory(tmp_path, base)

    assert inspection.problems == ()
    assert inspection.adapter is not None
    read = {
        lora.a.name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): lora
        for lora in inspection.adapter.loras
    }
    assert read.keys() == oracle.keys()
    for name, (rank, scaling, a, b) in oracle.items():
        assert (read[name].rank, read[name].scale) == (rank, scaling), name
        assert name.endswith(f"layers.{read[name].layer}.{name.split('.')[-2]}.{read[name].target}")
        np.testing.assert_array_equal(values(read[name].a), a)
        np.testing.assert_array_equal(values(read[name].b), b)


@pytest.mark.parametrize(
    ("dtype", "written"),
    [(torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")],
    ids=["fp32", "fp16", "bf16"],
)
def test_every_number_format_is_read_exactly(
    dtype: "torch.dtype", written: str, tmp_path: Path, base: BaseDescription
) -> None:
    oracle = save_with_peft(tmp_path, dtype=dtype, r=4, target_modules=["q_proj", "down_proj"])

    adapter = inspect_directory(tmp_path, base).adapter

    assert adapter is not None
    assert adapter.dtype == written
    for lora in adapter.loras:
        key = lora.a.name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        np.testing.assert_array_equal(values(lora.a), oracle[key][2])
        np.testing.assert_array_equal(values(lora.b), oracle[key][3])


def test_an_adapter_saved_from_the_headless_model_is_read_too(
    tmp_path: Path, base: BaseDescription
) -> None:
    model = peft.get_peft_model(
        tiny_llama().model,
        peft.LoraConfig(
            r=4, target_modules=["q_proj"], layers_to_transform=[1], layers_pattern="layers"
        ),
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)

    adapter = inspect_directory(tmp_path, base).adapter

    assert adapter is not None
    assert [(lora.layer, lora.target) for lora in adapter.loras] == [(1, "q_proj")]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        (
            {"target_modules": ["q_proj"], "lora_bias": True, "init_lora_weights": False},
            "lora_bias",
        ),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1]}, "trainable_token_indices"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_peft_can_do_and_this_engine_cannot_is_refused_by_name(
    settings: dict, words: str, tmp_path: Path, base: BaseDescription
) -> None:
    model = peft.get_peft_model(
        tiny_llama(), peft.LoraConfig(r=4, task_type="CAUSAL_LM", **settings)
    )
    model.save_pretrained(tmp_path)

    inspection = inspect_directory(tmp_path, base)

    assert inspection.adapter is None
    assert any(words in problem for problem in inspection.problems), inspection.problems


def test_every_field_of_pefts_config_is_known_here() -> None:
    """A new PEFT release may bring a field: then this test asks what it means."""
    from adapters import peft_config

    known = peft_config._NEVER_DECIDE | peft_config._READ | peft_config._NOT_SERVED.keys()
    fields = {f for f in peft.LoraConfig.__dataclass_fields__ if not f.startswith("_")}
    assert fields - known == set()


def test_an_untrained_adapter_is_said_to_have_no_effect(
    tmp_path: Path, base: BaseDescription
) -> None:
    peft.get_peft_model(
        tiny_llama(), peft.LoraConfig(r=4, target_modules=["q_proj"])
    ).save_pretrained(tmp_path)

    inspection = inspect_directory(tmp_path, base)

    assert inspection.has_no_effect
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
