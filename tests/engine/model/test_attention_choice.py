"""FlashInfer attends where it is installed, fits the model and agrees; else ours, and why."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import InvalidModel
from engine.model import attention_choice
from engine.model.attention_choice import AttentionChoice, choose_attention
from engine.model.kernel_choice import choose_kernels
from engine.model.loading import LoadedModel, load_model
from punica_kernels.flashinfer_attention import AttentionShape

CUDA = torch.device("cuda", 0)  # only a name here: nothing is asked of it
SHAPE = AttentionShape(
    num_heads=9, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16
)
FLASHINFER = SimpleNamespace(__version__="1.2.3", BatchPrefillWithPagedKVCacheWrapper=object)


def choose(
    asked: str = "auto", *, shape: AttentionShape = SHAPE, device: torch.device = CUDA
) -> AttentionChoice:
    return choose_attention(asked, shape=shape, device=device, progress=lambda _text: None)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what makes FlashInfer found; importing it and the trial do what they are told."""

    def install(
        *,
        on_import: Callable[[str], object] = lambda _name: FLASHINFER,
        trial: Callable[..., str | None] = lambda *_args, **_more: None,
    ) -> None:
        monkeypatch.setattr(attention_choice, "find_spec", lambda name: name)
        monkeypatch.setattr(attention_choice, "import_module", on_import)
        monkeypatch.setattr(attention_choice, "trial_problem", trial)
        monkeypatch.setattr(attention_choice, "FlashInferAttention", lambda *_args, **_more: "it")

    return install


def never_import(name: str) -> object:
    return pytest.fail(f"{name} was imported")


def test_one_that_agrees_is_taken_and_named_with_its_version(install: Callable[..., None]) -> None:
    install()
    for asked in ("auto", "flashinfer"):
        choice = choose(asked)
        assert choice.flashinfer == "it"
        assert "FlashInfer 1.2.3" in choice.reason


def test_without_it_ours_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "find_spec", lambda _name: None)
    choice = choose()
    assert choice.flashinfer is None
    assert choice.reason == "attention is its own: FlashInfer isn't installed"
    with pytest.raises(InvalidModel, match=r"can't attend here: FlashInfer isn't installed"):
        choose("flashinfer")


def test_ours_can_be_forced_and_then_it_is_not_imported(install: Callable[..., None]) -> None:
    install(on_import=never_import)
    choice = choose("triton")
    assert choice.flashinfer is None
    assert "asked for" in choice.reason


@pytest.mark.parametrize(
    ("shape", "device", "words"),
    [
        (SHAPE, torch.device("cpu"), "on CUDA devices only"),
        (replace(SHAPE, dtype=torch.float32), CUDA, "no kernels for float32"),
        (replace(SHAPE, head_dim=80), CUDA, "no kernels for heads of 80"),
    ],
    ids=["cpu", "fp32", "heads of 80"],
)
def test_where_it_can_not_fit_it_is_not_even_imported(
    install: Callable[..., None], shape: AttentionShape, device: torch.device, words: str
) -> None:
    install(on_import=never_import)
    assert words in choose(shape=shape, device=device).reason
    with pytest.raises(InvalidModel, match=words):
        choose("flashinfer", shape=shape, device=device)


def test_one_that_fails_is_not_taken_and_its_first_line_is_said(
    install: Callable[..., None],
) -> None:
    def without_a_compiler(*_args: object, **_more: object) -> str | None:
        raise RuntimeError("Could not find nvcc\nand much more")

    install(trial=without_a_compiler)
    choice = choose()
    assert choice.flashinfer is None
    assert choice.reason.endswith("FlashInfer failed (RuntimeError: Could not find nvcc)")


def test_one_that_disagrees_is_not_taken(install: Callable[..., None]) -> None:
    install(trial=lambda *_args, **_more: "in a trial its result was off by 3.14")
    assert "1.2.3 isn't taken: in a trial its result was off by 3.14" in choose().reason


@pytest.mark.parametrize(
    ("found", "words"),
    [(None, "attention is its own: FlashInfer isn't installed"), ("it", "FlashInfer is installed")],
)
def test_the_reason_stands_beside_that_of_the_kernels_with_a_model_and_without(
    monkeypatch: pytest.MonkeyPatch, found: str | None, words: str
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(attention_choice, "find_spec", lambda _name: found)
    monkeypatch.setattr(attention_choice, "import_module", never_import)
    assert words in choose_kernels("auto", num_threads=1, device=CUDA).reason
    ours = choose_kernels(
        "auto", num_threads=1, device=CUDA, choose_attention=lambda: choose("triton")
    )
    assert ours.name == "triton"
    assert ours.reason == "Triton can run here; attention is its own, as asked for"


def test_asking_for_it_on_a_cpu_is_refused_in_words(
    default_model: LoadedModel, tmp_path: object
) -> None:
    config = EngineConfig(
        model=str(default_model.model_dir), state_dir=str(tmp_path), attention="flashinfer"
    )
    with pytest.raises(InvalidModel, match="FlashInfer attends beside the Triton kernels, but"):
        load_model(config, progress=lambda _text: None)


def test_an_attention_that_is_none_of_the_three_is_refused(tmp_path: object) -> None:
    with pytest.raises(ValueError, match="attention must be auto, triton or flashinfer, not 'x'"):
        EngineConfig(model="m", state_dir=str(tmp_path), attention="x")
