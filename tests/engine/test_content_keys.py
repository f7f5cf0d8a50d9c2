"""What was computed with an adapter is found again by its content, never by its name."""

import shutil
from pathlib import Path

from engine.llm import LLM, Completion
from engine.protocol import SamplingParams
from tests.end_to_end.peft_reference import save_random_adapter, save_tiny_llama

PROMPT = [3 + 7 * place for place in range(40)]
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def ask(llm: LLM, lora_id: str) -> Completion:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    (completion,) = llm.generate([PROMPT], params, lora_ids=[lora_id])
    return completion


def test_new_weights_under_an_old_name_meet_no_old_kv(tmp_path: Path) -> None:
    """A raw name, as vLLM's endpoint takes it: the files change, the name and the path don't."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    save_tiny_llama(base)
    for seed in (1, 2):
        save_random_adapter(base, tmp_path / str(seed), seed=seed, **CONFIG)
    with LLM(
        str(base), state_dir=str(tmp_path / "state"), dtype="fp32", num_threads=1, kernels="torch"
    ) as llm:
        llm.load_adapter("cold-2", tmp_path / "2")
        expected = ask(llm, "cold-2")

        shutil.copytree(tmp_path / "1", folder)
        llm.load_adapter("style", folder)
        old = ask(llm, "style")
        assert ask(llm, "style").num_cached_tokens > 0
        llm.unload_adapter("style")
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "2", folder)
        llm.load_adapter("style", folder)
        new = ask(llm, "style")
        llm.load_adapter("cold-1", tmp_path / "1")
        again = ask(llm, "cold-1")

    assert old.num_cached_tokens == expected.num_cached_tokens == 0
    assert new.token_ids == expected.token_ids != old.token_ids
    # Other names of contents that have been here are welcome to what these have computed.
    assert new.num_cached_tokens > 0
    assert again.num_cached_tokens > 0
    assert again.token_ids == old.token_ids
