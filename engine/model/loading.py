"""From the name of a model to a decoder that can run steps."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.errors import InvalidModel
from engine.model.attention_choice import choose_attention
from engine.model.checkpoint import Checkpoint
from engine.model.decoder import Decoder
from engine.model.device import open_device
from engine.model.embedding_digests import EmbeddingDigests, embedding_digests
from engine.model.gguf import convert_gguf
from engine.model.hub import fetch_from_hub, looks_like_hub_id
from engine.model.identity import DigestCache, base_identity, digests_of
from engine.model.json_file import read_json
from engine.model.kernel_choice import KernelChoice, choose_kernels
from engine.model.out_of_memory import allocating
from engine.model.packing import build_decoder
from engine.model.spec import ModelSpec, spec_from_hf_config
from punica_kernels.flashinfer_attention import AttentionShape

_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_QUANTISATION_SUFFIX = re.compile(r"[.-](I?Q\d\w*|TQ\d\w*|B?F16|F32|MXFP4)$", re.IGNORECASE)
_HUB_CACHE_NAME = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A base model in memory, and where its tokenizer is.

    model_dir           has tokenizer.json, and tokenizer_config.json or chat_template.jinja
    base_id             public id; never a path
    identity            "sha256:…" over weights, format, dtype and rope
    eos_token_ids       tokens that end an answer
    max_model_len       the operator's limit, or the checkpoint's
    embedding_digests   see BaseDescription
    """

    spec: ModelSpec
    decoder: Decoder
    model_dir: Path
    base_id: str
    identity: str
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    weight_bytes: int
    max_model_len: int
    embedding_digests: EmbeddingDigests

    @property
    def device(self) -> torch.device:
        """Where weights, KV and arena are."""
        return self.decoder.embedding.device


def load_model(config: EngineConfig, *, progress: Callable[[str], None]) -> LoadedModel:
    """Find, check and read the model that `config` names.

    Raises InvalidModel in words for everything that keeps it from being served.
    """
    device = open_device(
        config.device, worker_index=config.worker_index, num_workers=config.num_workers
    )
    model_dir, base_id = _locate(config, progress=progress)
    hf_config = read_json(model_dir / "config.json")
    spec = spec_from_hf_config(hf_config)
    max_model_len = _max_model_len(config, spec)
    _check_tokenizer(model_dir)
    checkpoint = Checkpoint(model_dir)
    dtype = _resolve_dtype(config.dtype, spec, checkpoint)
    kernels = _choose_kernels(config, spec, _TORCH_DTYPES[dtype], device, progress)
    progress(f"kernels: {kernels.name} ({kernels.reason})")
    progress(f"reading weights of {base_id} as {dtype}")
    with allocating("the weights", device=device, remedy="serve a smaller model"):
        decoder = build_decoder(
            checkpoint,
            spec,
            dtype=_TORCH_DTYPES[dtype],
            max_model_len=max_model_len,
            device=device,
            make_kernels=kernels.factory,
        )
    progress("computing the identity of the weights")
    models_dir = Path(config.state_dir) / "models"
    file_digests = digests_of(checkpoint.files, DigestCache(models_dir / "digests.json"))
    return LoadedModel(
        spec=spec,
        decoder=decoder,
        model_dir=model_dir,
        base_id=base_id,
        identity=base_identity(spec, file_digests, dtype=dtype),
        eos_token_ids=_eos_token_ids(hf_config, model_dir),
        dtype=_TORCH_DTYPES[dtype],
        weight_bytes=decoder.num_weight_bytes,
        max_model_len=max_model_len,
        embedding_digests=embedding_digests(
            checkpoint, spec, file_digests=file_digests, cache=models_dir / "embeddings.json"
        ),
    )


def public_name(path: Path) -> str:
    """Return the base id of a local checkpoint: its own name, without place or number format."""
    resolved = path.resolve()
    if path.suffix == ".gguf":
        return _QUANTISATION_SUFFIX.sub("", path.stem) or path.stem
    if resolved.parent.name == "snapshots":
        cached = _HUB_CACHE_NAME.fullmatch(resolved.parent.parent.name)
        if cached is not None:
            return f"{cached['owner']}/{cached['name']}"
    return resolved.name


def _locate(config: EngineConfig, *, progress: Callable[[str], None]) -> tuple[Path, str]:
    path = Path(config.model).expanduser()
    if path.is_dir():
        return path, config.served_model_name or public_name(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InvalidModel(
                f"{path.name!r} is neither a directory nor a .gguf file; give the directory "
                "that holds config.json"
            )
        models_dir = Path(config.state_dir) / "models"
        converted = convert_gguf(path, models_dir=models_dir, progress=progress)
        return converted, config.served_model_name or public_name(path)
    if not looks_like_hub_id(config.model) or path.suffix == ".gguf":
        raise InvalidModel(f"there is no model at {config.model!r}")
    directory = fetch_from_hub(config.model, progress=progress)
    return directory, config.served_model_name or config.model


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len is None:
        return spec.max_model_len
    if config.max_model_len > spec.max_model_len:
        raise InvalidModel(
            f"max_model_len is {config.max_model_len}, but this model was made for "
            f"{spec.max_model_len} tokens"
        )
    return config.max_model_len


def _check_tokenizer(model_dir: Path) -> None:
    if not (model_dir / "tokenizer.json").is_file():
        raise InvalidModel(
            "the checkpoint has no tokenizer.json; save its tokenizer again with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )


def _resolve_dtype(asked: str, spec: ModelSpec, checkpoint: Checkpoint) -> str:
    """Return the format to run in: the checkpoint's own for "auto", fp16 as bf16."""
    if asked != "auto":
        return asked
    stored = spec.dtype
    if stored is None:
        embedding = "model.embed_tokens.weight"
        stored = checkpoint.dtype(embedding) if embedding in checkpoint.names else "fp32"
    return "bf16" if stored == "fp16" else stored


def _choose_kernels(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None],
) -> KernelChoice:
    shape = AttentionShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=config.block_size,
        dtype=dtype,
    )
    kernels = choose_kernels(
        config.kernels,
        num_threads=config.num_threads or os.cpu_count() or 1,
        device=device,
        choose_attention=partial(
            choose_attention, config.attention, shape=shape, device=device, progress=progress
        ),
    )
    if config.attention == "flashinfer" and kernels.name != "triton":
        raise InvalidModel(
            "FlashInfer attends beside the Triton kernels, but these steps would run on "
            f"{kernels.name} ({kernels.reason})"
        )
    return kernels


def _eos_token_ids(hf_config: dict[str, Any], model_dir: Path) -> tuple[int, ...]:
    """Return generation_config.json's end tokens, or else config.json's."""
    value = None
    if (model_dir / "generation_config.json").is_file():
        value = read_json(model_dir / "generation_config.json").get("eos_token_id")
    if value is None:
        value = hf_config.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))
