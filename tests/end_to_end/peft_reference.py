"""The oracle of grade E1: PEFT and transformers, one prompt and one adapter at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

BASE = None


def save_tiny_llama(directory: Path, *, seed: int = 0) -> None:
    """Save a random Llama of four layers whose logits are not all alike."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def save_random_adapter(base_dir: Path, directory: Path, *, seed: int, **config: object) -> None:
    """Save a PEFT adapter whose B is random too, so that it says something of its own."""
    torch.manual_seed(seed)
    base = LlamaForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    model.save_pretrained(directory)


class PeftReference:
    """One base and its adapters, as PEFT applies them to a lone prompt; fp32."""

    def __init__(self, base: PreTrainedModel, adapters: Mapping[str, Path]) -> None:
        names = list(adapters)
        self.model = PeftModel.from_pretrained(base, adapters[names[0]], adapter_name=names[0])
        for name in names[1:]:
            self.model.load_adapter(adapters[name], adapter_name=name)
        self.model.eval()

    @contextmanager
    def applying(self, name: str | None) -> Iterator[None]:
        if name is BASE:
            with self.model.disable_adapter():
                yield
        else:
            self.model.set_adapter(name)
            yield

    @torch.inference_mode()
    def greedy(self, prompt_ids: list[int], *, name: str | None, num_tokens: int) -> list[int]:
        """Return `num_tokens` greedy tokens; an end token doesn't end it."""
        ids, cache, tokens = torch.tensor([prompt_ids]), None, []
        with self.applying(name):
            for _ in range(num_tokens):
                output = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                ids = output.logits[:, -1:].argmax(-1)
                tokens.append(int(ids))
        return tokens

    @torch.inference_mode()
    def logits(self, token_ids: list[int], *, name: str | None) -> torch.Tensor:
        """Return logits [num_tokens, vocab] of a whole sequence at once."""
        with self.applying(name):
            return self.model(input_ids=torch.tensor([token_ids])).logits[0].float()
