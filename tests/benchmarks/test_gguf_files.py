"""An adapter in llama.cpp's form has its names and shapes, and q and k rows in its order."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from peers.gguf_files import bf16_copy, gguf_name, lora_copy, permuted
from safetensors.torch import save_file

from engine.model.gguf import unpermuted

HIDDEN, NUM_HEADS, NUM_KV_HEADS, LORA_RANK = 32, 4, 2, 4
HEAD_DIM = HIDDEN // NUM_HEADS


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    weight = np.linspace(-1, 1, HIDDEN * HIDDEN, dtype=np.float32).reshape(HIDDEN, HIDDEN)
    quantised = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter-r4-0"
    folder.mkdir()
    name = "base_model.model.model.layers.0"
    rows = {"q": NUM_HEADS * HEAD_DIM, "k": NUM_KV_HEADS * HEAD_DIM, "v": NUM_KV_HEADS * HEAD_DIM}
    tensors = {}
    for part, num_rows in rows.items():
        path = f"{name}.self_attn.{part}_proj"
        tensors[f"{path}.lora_A.weight"] = torch.randn(LORA_RANK, HIDDEN).to(torch.bfloat16)
        # Row numbers that bf16 holds exactly, so that the order can be read off.
        column = torch.arange(num_rows).to(torch.bfloat16)
        tensors[f"{path}.lora_B.weight"] = column[:, None].repeat(1, LORA_RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"r": LORA_RANK, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def test_a_peft_name_becomes_llama_cpps() -> None:
    key = "base_model.model.model.layers.12.mlp.down_proj.lora_B.weight"

    assert gguf_name(key) == ("blk.12.ffn_down.weight.lora_b", "ffn_down")


def test_what_is_no_linear_module_is_refused() -> None:
    with pytest.raises(ValueError, match="no LoRA matrix"):
        gguf_name("base_model.model.model.embed_tokens.lora_embedding_A")


def test_permuted_is_what_the_loader_undoes() -> None:
    rows = np.arange(HIDDEN * 3).reshape(HIDDEN, 3)

    assert (unpermuted(permuted(rows, NUM_HEADS), NUM_HEADS) == rows).all()


def test_an_adapters_matrices_keep_their_shapes_and_its_alpha(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    reader = gguf.GGUFReader(lora_copy(adapter, base, tmp_path / "out"))

    shapes = {tensor.name: tuple(reversed(tensor.shape)) for tensor in reader.tensors}
    assert shapes["blk.0.attn_q.weight.lora_a"] == (LORA_RANK, HIDDEN)
    assert shapes["blk.0.attn_q.weight.lora_b"] == (NUM_HEADS * HEAD_DIM, LORA_RANK)
    assert shapes["blk.0.attn_k.weight.lora_b"] == (NUM_KV_HEADS * HEAD_DIM, LORA_RANK)
    assert len(shapes) == 6
    assert reader.fields["adapter.lora.alpha"].contents() == 8
    assert reader.fields["general.type"].contents() == "adapter"
    assert reader.fields["general.architecture"].contents() == "llama"


def test_rows_of_q_and_k_are_interleaved_and_those_of_v_are_not(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    reader = gguf.GGUFReader(lora_copy(adapter, base, tmp_path / "out"))

    columns = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        columns[tensor.name] = values[:, 0].astype(int).tolist()
    assert columns["blk.0.attn_k.weight.lora_b"][:HEAD_DIM] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert columns["blk.0.attn_v.weight.lora_b"] == list(range(NUM_KV_HEADS * HEAD_DIM))


def test_a_copy_of_the_base_is_bf16_in_matrices_and_fp32_in_vectors(
    base: Path, tmp_path: Path
) -> None:
    reader = gguf.GGUFReader(bf16_copy(base, tmp_path / "out"))

    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds == {"blk.0.attn_norm.weight": "F32", "blk.0.attn_q.weight": "BF16"}
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert reader.fields["llama.attention.head_count_kv"].contents() == NUM_KV_HEADS
