"""The default model and PEFT adapters as llama.cpp wants them: GGUF in bf16."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

BF16 = gguf.GGMLQuantizationType.BF16
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def bf16_copy(path: Path, folder: Path) -> Path:
    """A copy of a GGUF file with matrices in bf16 and vectors in fp32; made once."""
    copy = folder / f"{path.stem}-bf16.gguf"
    if not copy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        reader = gguf.GGUFReader(path)
        writer = gguf.GGUFWriter(copy.with_suffix(".part"), _text(reader, "general.architecture"))
        _copy_metadata(reader, writer)
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            values = values.reshape([int(extent) for extent in reversed(tensor.shape)])
            _add(writer, tensor.name, values.astype(np.float32))
        _finish(writer, copy)
    return copy


def lora_copy(adapter: Path, base: Path, folder: Path) -> Path:
    """A PEFT adapter as a GGUF one for `base`; made once."""
    copy = folder / f"{adapter.name}.gguf"
    if not copy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.loads((adapter / "adapter_config.json").read_text())
        architecture, num_heads = _heads(base)
        writer = gguf.GGUFWriter(copy.with_suffix(".part"), architecture)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(settings["lora_alpha"]))
        for name, values in lora_tensors(adapter, num_heads=num_heads):
            _add(writer, name, values)
        _finish(writer, copy)
    return copy


def lora_tensors(
    adapter: Path, *, num_heads: dict[str, int]
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """The adapter's tensors under llama.cpp's names: A [rank, in], B [out, rank].

    Rows of B for q and k are interleaved within each head, like those of the base.
    """
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  the file is no mapping
            name, part = gguf_name(key)
            values = file.get_tensor(key).to(torch.float32).numpy()
            if name.endswith(".lora_b") and part in num_heads:
                values = permuted(values, num_heads[part])
            yield name, np.ascontiguousarray(values)


def gguf_name(key: str) -> tuple[str, str]:
    """The name of a PEFT tensor in GGUF, and the part of the layer that it belongs to."""
    path, _, matrix = key.removesuffix(".weight").rpartition(".lora_")
    layer, _, module = path.partition(".layers.")[2].partition(".")
    if module not in PARTS or matrix not in {"A", "B"}:
        raise ValueError(f"{key} is no LoRA matrix of a linear module")
    return f"blk.{layer}.{PARTS[module]}.weight.lora_{matrix.lower()}", PARTS[module]


def permuted(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of q or k with the two halves of each head interleaved, as llama.cpp rotates them."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


@functools.cache
def _heads(base: Path) -> tuple[str, dict[str, int]]:
    """The base's architecture, and how many heads its q and k have; reading it takes a second."""
    reader = gguf.GGUFReader(base)
    architecture = _text(reader, "general.architecture")
    return architecture, {
        "attn_q": int(reader.fields[f"{architecture}.attention.head_count"].contents()),
        "attn_k": int(reader.fields[f"{architecture}.attention.head_count_kv"].contents()),
    }


def _add(writer: gguf.GGUFWriter, name: str, values: npt.NDArray[np.float32]) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values)
    else:
        rounded = torch.from_numpy(values).to(torch.bfloat16)
        writer.add_tensor(name, rounded.view(torch.uint8).numpy(), raw_dtype=BF16)


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents()
        if field.name == "general.file_type":
            value = int(gguf.LlamaFileType.MOSTLY_BF16)
        sub_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=sub_type)


def _finish(writer: gguf.GGUFWriter, copy: Path) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    copy.with_suffix(".part").rename(copy)


def _text(reader: gguf.GGUFReader, key: str) -> str:
    return str(reader.fields[key].contents())
