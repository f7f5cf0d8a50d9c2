"""Rotary position embedding: the tables, made once, and their use on q and k together."""

import math

import torch

from engine.model.spec import ModelSpec, RopeKind, RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:  # [head_dim / 2] fp32
    """Return the angle that each pair of a head turns by from one position to the next."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind is RopeKind.LINEAR:
        return frequencies / rope.factor
    if rope.kind is RopeKind.LLAMA3:
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Slow waves are stretched by `factor`, quick ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(
        wavelengths > shortest_stretched, frequencies / rope.factor, frequencies
    )
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return torch.where(between, blended, stretched)


class RotaryTable:
    """cos and sin of every position up to `max_model_len`; the sign of the half turn is in sin.

    rotate(x) = x·cos + (x with its halves swapped)·sin, where sin is negative in the first half.
    """

    def __init__(
        self, spec: ModelSpec, *, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        positions = torch.arange(max_model_len, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(spec.rope, spec.head_dim)
        cos, sin = angles.cos(), angles.sin()
        self._half = spec.head_dim // 2
        self._cos = torch.cat((cos, cos), dim=-1).to(dtype=dtype, device=device)
        self._signed_sin = torch.cat((-sin, sin), dim=-1).to(dtype=dtype, device=device)

    @property
    def dtype(self) -> torch.dtype:
        """The format of the tables, which is the model's."""
        return self._cos.dtype

    def half_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of each pair, [max_model_len, head_dim / 2] fp32, contiguous.

        They are the tables' own values: rounded to the model's format, as it was trained.
        """
        half = self._half
        return (
            self._cos[:, :half].float().contiguous(),
            self._signed_sin[:, half:].float().contiguous(),
        )

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and signed sin of a step, [num_tokens, 1, head_dim] each."""
        return (
            self._cos.index_select(0, positions).unsqueeze_(1),
            self._signed_sin.index_select(0, positions).unsqueeze_(1),
        )

    def rotate(
        self, heads: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:  # [num_tokens, num_heads + num_kv_heads, head_dim]
        """Return `heads` turned by their positions; `heads` itself is unchanged."""
        cos, signed_sin = rows
        swapped = torch.roll(heads, self._half, -1)
        return (heads * cos).addcmul_(swapped, signed_sin)
