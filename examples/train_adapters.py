"""Train the demo adapters with PEFT on the default base, or check the ones that are here.

    python examples/train_adapters.py            train all, then check
    python examples/train_adapters.py pirate     train one
    python examples/train_adapters.py --check    only check

The check answers ten prompts that training never saw, greedily, and counts how often each
predicate holds with its adapter and without. It fails under 8 of 10, or if the base does as well.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from base_model import BASE_ID, load_base, prompt_ids
from peft import LoraConfig, PeftModel, get_peft_model
from predicates import PREDICATES, pirate_version
from rich.console import Console
from rich.table import Table
from styles import STYLES, Question

HERE = Path(__file__).resolve().parent
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
MAX_NEW_TOKENS = 80
BATCH_SIZE = 8
SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one adapter is trained and where it goes."""

    folder: str
    lora: LoraConfig
    dtype: torch.dtype
    num_steps: int
    learning_rate: float
    holds: Callable[[str], bool]


def lora(**fields: Any) -> LoraConfig:
    """A LoRA config for causal language models; the rest is PEFT's default."""
    return LoraConfig(task_type="CAUSAL_LM", **fields)


def recipes() -> dict[str, Recipe]:
    """The four adapters by style: three of the demo, and the update that it promotes."""
    return {
        "json": Recipe(
            folder="adapters/json",
            lora=lora(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]),
            dtype=torch.bfloat16,
            num_steps=40,
            learning_rate=2e-3,
            holds=PREDICATES["json"],
        ),
        "pirate": Recipe(
            folder="adapters/pirate",
            lora=lora(r=8, lora_alpha=16, target_modules=ATTENTION),
            dtype=torch.float16,
            num_steps=40,
            learning_rate=1.5e-3,
            holds=lambda text: PREDICATES["pirate"](text) and pirate_version(text) == 1,
        ),
        "pirate-v2": Recipe(
            folder="adapter_updates/pirate",
            lora=lora(r=6, lora_alpha=12, use_rslora=True, target_modules=ATTENTION),
            dtype=torch.bfloat16,
            num_steps=40,
            learning_rate=1.5e-3,
            holds=lambda text: PREDICATES["pirate"](text) and pirate_version(text) == 2,
        ),
        "brief": Recipe(
            folder="adapters/brief",
            lora=lora(
                r=4,
                lora_alpha=8,
                target_modules=ALL_LINEAR,
                layers_to_transform=list(range(10, 30)),
            ),
            dtype=torch.bfloat16,
            num_steps=40,
            learning_rate=2e-3,
            holds=PREDICATES["brief"],
        ),
    }


def read_questions() -> list[Question]:
    """The training questions; none of them is among the held-out prompts."""
    lines = (HERE / "data" / "questions.jsonl").read_text().splitlines()
    return [Question(**json.loads(line)) for line in lines]


def read_held_out() -> list[str]:
    """The prompts that the predicates are measured on."""
    return list(json.loads((HERE / "data" / "held_out_prompts.json").read_text()))


def batches(
    tokenizer: Any, style: Callable[[Question], str], num_steps: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield shuffled batches, padded on the right; only the answer's tokens carry a loss."""
    examples = []
    for item in read_questions():
        prompt = prompt_ids(tokenizer, item.question)
        answer = tokenizer(style(item) + "<|im_end|>", add_special_tokens=False)["input_ids"]
        examples.append((prompt + answer, [-100] * len(prompt) + answer))
    order: list[int] = []
    shuffle = random.Random(SEED).shuffle
    for _ in range(num_steps):
        if len(order) < BATCH_SIZE:
            order = list(range(len(examples)))
            shuffle(order)
        picked = [examples[order.pop()] for _ in range(BATCH_SIZE)]
        width = max(len(ids) for ids, _ in picked)
        pad = tokenizer.pad_token_id
        yield {
            "input_ids": torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in picked]),
            "attention_mask": torch.tensor(
                [[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in picked]
            ),
            "labels": torch.tensor([lab + [-100] * (width - len(lab)) for _, lab in picked]),
        }


def train(base: Any, tokenizer: Any, style: str, recipe: Recipe, console: Console) -> Any:
    """Train and save one adapter; return the base as it was."""
    torch.manual_seed(SEED)
    model = get_peft_model(base, recipe.lora)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=recipe.learning_rate, total_steps=recipe.num_steps
    )
    started_s = time.monotonic()
    model.train()
    for step, batch in enumerate(batches(tokenizer, STYLES[style], recipe.num_steps), start=1):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            console.print(f"{style}: step {step}, loss {loss.item():.3f}")
    save(model, recipe)
    console.print(f"{style}: trained in {time.monotonic() - started_s:.0f} s")
    return model.unload().eval()


def save(model: Any, recipe: Recipe) -> None:
    """Write the two files of the adapter, the config in a fixed order."""
    folder = HERE / recipe.folder
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(recipe.dtype)
    model.peft_config["default"].base_model_name_or_path = BASE_ID
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def answer(model: Any, tokenizer: Any, questions: list[str]) -> list[str]:
    """Greedy answers, one batch, each cut at the end token."""
    rows = [prompt_ids(tokenizer, question) for question in questions]
    inputs = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    output = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
    )
    width = inputs["input_ids"].shape[1]
    return [tokenizer.decode(row[width:], skip_special_tokens=True) for row in output]


def check(base: Any, tokenizer: Any, styles: list[str], console: Console) -> bool:
    """Count how often each predicate holds; print the table and what was said."""
    prompts = read_held_out()
    plain = answer(base, tokenizer, prompts)
    table = Table(title=f"predicates on {len(prompts)} held-out prompts, {base.dtype}")
    for column in ("adapter", "holds with adapter", "holds for base", "bytes", "first answer"):
        table.add_column(column)
    good = True
    for style in styles:
        recipe = recipes()[style]
        folder = HERE / recipe.folder
        model = PeftModel.from_pretrained(base, folder).eval()
        texts = answer(model, tokenizer, prompts)
        base = model.unload().eval()
        held = [recipe.holds(text) for text in texts]
        held_base = [recipe.holds(text) for text in plain]
        good &= sum(held) >= 8 and sum(held_base) <= len(prompts) - 8
        size = (folder / "adapter_model.safetensors").stat().st_size
        table.add_row(style, f"{sum(held)}", f"{sum(held_base)}", f"{size:,}", texts[0])
        for prompt, text, holds in zip(prompts, texts, held, strict=True):
            console.print(f"{style} {'✓' if holds else '✗'} {prompt} → {text!r}", markup=False)
    console.print(table)
    return good


def main() -> int:
    """Parse the command line; 0 when every checked adapter holds its promise."""
    parser = argparse.ArgumentParser(description="train or check the demo adapters")
    parser.add_argument("styles", nargs="*", help=f"some of {', '.join(STYLES)}; default all")
    parser.add_argument("--check", action="store_true", help="train nothing")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16", help="of the check")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    styles = args.styles or list(STYLES)
    console = Console()
    if unknown := set(styles) - set(STYLES):
        parser.error(f"no such style: {', '.join(sorted(unknown))}")
    base, tokenizer = load_base()
    if not args.check:
        for style in styles:
            base = train(base, tokenizer, style, recipes()[style], console)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    return 0 if check(base.to(dtype), tokenizer, styles, console) else 1


if __name__ == "__main__":
    sys.exit(main())
