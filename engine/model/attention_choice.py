"""Whose attention the Triton kernels run with on CUDA, and why; decided once, at start."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from engine.errors import InvalidModel
from engine.model.attention_trial import trial_problem
from punica_kernels.flashinfer_attention import AttentionShape, FlashInferAttention

_HEAD_DIMS = (64, 128, 256)  # that all kernels of its prefill have
_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """What was chosen.

    reason       in words, for a person; says the name, too
    flashinfer   runs steps with a chunk of several tokens; None: ours runs all
    """

    reason: str
    flashinfer: FlashInferAttention | None = None


class _Unusable(Exception):
    """FlashInfer can't attend here; the text says why."""


def choose_attention(
    asked: str,
    *,
    shape: AttentionShape,
    device: torch.device,
    progress: Callable[[str], None],
) -> AttentionChoice:
    """Choose FlashInfer for "auto" or "flashinfer" where it can run, else our own kernel.

    FlashInfer is imported on CUDA only, and is taken only if it agrees with plain torch in a trial.
    Raises InvalidModel in words if it was asked for by its name and can't be had.
    """
    if asked == "triton":
        return AttentionChoice(reason="attention is its own, as asked for")
    try:
        return _flashinfer(shape, device, progress)
    except _Unusable as problem:
        if asked == "flashinfer":
            raise InvalidModel(f"FlashInfer can't attend here: {problem}") from problem
        return AttentionChoice(reason=f"attention is its own: {problem}")


def expected_attention(device_type: str) -> AttentionChoice:
    """Say what can be said before a model is known, for `loraplex doctor`; runs ours."""
    problem = _installation_problem(device_type)
    if problem is not None:
        return AttentionChoice(reason=f"attention is its own: {problem}")
    return AttentionChoice(reason="FlashInfer is installed and attends if it fits the model")


def _flashinfer(
    shape: AttentionShape, device: torch.device, progress: Callable[[str], None]
) -> AttentionChoice:
    problem = _installation_problem(device.type) or _shape_problem(shape)
    if problem is not None:
        raise _Unusable(problem)
    progress("trying FlashInfer's attention (the first time, it may be compiled)")
    try:
        package = import_module("flashinfer")
        attention = FlashInferAttention(
            package.BatchPrefillWithPagedKVCacheWrapper, shape=shape, device=device
        )
        problem = trial_problem(attention, shape=shape, device=device)
    except Exception as error:  # whatever it raises: it can't be used
        lines = str(error).splitlines() or [""]
        raise _Unusable(f"FlashInfer failed ({type(error).__name__}: {lines[0]})") from error
    if problem is not None:
        raise _Unusable(f"FlashInfer {package.__version__} isn't taken: {problem}")
    return AttentionChoice(
        reason=f"FlashInfer {package.__version__} attends where a chunk has several tokens",
        flashinfer=attention,
    )


def _installation_problem(device_type: str) -> str | None:
    """Say in words what can be known without a model, and without importing it."""
    if device_type != "cuda":
        return "FlashInfer runs on CUDA devices only"
    if find_spec("flashinfer") is None:
        return "FlashInfer isn't installed"
    return None


def _shape_problem(shape: AttentionShape) -> str | None:
    """Say in words what it has no kernels for; any grouping of heads is fine."""
    if shape.dtype not in _DTYPES:
        return f"FlashInfer has no kernels for {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in _HEAD_DIMS:
        return f"FlashInfer has no kernels for heads of {shape.head_dim}"
    return None
