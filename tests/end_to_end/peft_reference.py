"""The oracle of grade E1: PEFT and transformers, one prompt and one adapter at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

BASE = None


def save_tiny_llama(
    directory: Path, *, seed: int = 0, tied: bool = False, max_positions: int = 1024
) -> None:
    """Save a random Llama of four layers whose logits are not all alike; its words are w0, w1…"""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    save_word_tokenizer(directory, num_words=512)


def save_word_tokenizer(directory: Path, *, num_words: int) -> None:
    """Save a tokenizer whose words are w0, w1…"""
    vocabulary = {f"w{token_id}": token_id for token_id in range(num_words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))


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

    def __init__(
        self, base: PreTrainedModel, adapters: Mapping[str, Path], **options: bool
    ) -> None:
        names = list(adapters)
        model = PeftModel.from_pretrained(
            base, adapters[names[0]], adapter_name=names[0], **options
        )
        for name in names[1:]:
            model.load_adapter(adapters[name], adapter_name=name, **options)
        self._take(model)

    @classmethod
    def around(cls, model: PeftModel) -> "PeftReference":
        """Take a model that has its adapters already."""
        reference = cls.__new__(cls)
        reference._take(model)
        return reference

    def _take(self, model: PeftModel) -> None:
        self.model = model.eval()
        self._greedy: dict[tuple[object, ...], list[int]] = {}

    @property
    def names(self) -> list[str]:
        return list(self.model.peft_config)

    @contextmanager
    def applying(self, name: str | None) -> Iterator[None]:
        if name is BASE:
            with self.model.disable_adapter():
                yield
        else:
            self.model.set_adapter(name)
            yield

    def greedy(self, prompt_ids: list[int], *, name: str | None, num_tokens: int) -> list[int]:
        """Return `num_tokens` greedy tokens; an end token doesn't end it.

        The whole sequence is computed anew for each token: no cache of theirs that could be wrong.
        """
        key = (name, num_tokens, *prompt_ids)
        if key not in self._greedy:
            token_ids = list(prompt_ids)
            for _ in range(num_tokens):
                token_ids.append(int(self.logits(token_ids, name=name)[-1].argmax()))
            self._greedy[key] = token_ids[len(prompt_ids) :]
        return self._greedy[key]

    @torch.inference_mode()
    def logits(self, token_ids: list[int], *, name: str | None) -> torch.Tensor:
        """Return logits [num_tokens, vocab] of a whole sequence at once."""
        with self.applying(name):
            return (
                self.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()
            )
