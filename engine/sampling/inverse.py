"""Draws from rows of probabilities by the inverse of their distribution function."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.transfer import upload

# Sums of this many probabilities at a time, then a search in one tile: a running sum over a whole
# vocabulary in fp64 takes four times as long, and in fp32 it loses the tail.
_TILE = 256
_BELOW_ONE = 1.0 - 2.0**-49


def invert(probs: Tensor, noise: list[float]) -> Tensor:
    """Return, per row of probs [num_rows, vocab], the token at which the running sum passes noise.

    As [num_rows] int64, where probs are. Of a row with a NaN it is any number.

    Rows needn't sum to 1: noise, in (0, 1), is a share of the row's sum, which isn't 0. Tokens are
    in the order of their ids: without a sort, a small change of the probabilities changes few
    draws, however many tokens are about equally likely. A token of probability 0 is never drawn.
    """
    num_rows, vocab = probs.shape
    tiles = pad(probs, (0, -vocab % _TILE)).view(num_rows, -1, _TILE)
    share = upload(noise, dtype=torch.float64, device=probs.device).unsqueeze(-1)
    tile, share = _pass(tiles.sum(-1, dtype=torch.float64), share)  # [num_rows, 1]
    rows = torch.arange(num_rows, device=probs.device)
    token, _ = _pass(tiles[rows, tile.squeeze(-1)].double(), share)
    return (tile * _TILE + token).squeeze(-1)


def _pass(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the running sum of weights [num_rows, n] passes share [num_rows, 1] of it.

    And which share of that one weight lies below the point. Weights of 0 are never passed at:
    they leave the sum as it is.
    """
    sums = weights.cumsum(-1)
    target = share * sums[:, -1:]  # strictly below the sum, as share is at most 1 - 2**-49
    index = torch.searchsorted(sums, target, right=True)
    index = index.clamp(max=weights.shape[-1] - 1)  # a NaN is passed nowhere
    weight = weights.gather(-1, index)
    below = sums.gather(-1, index) - weight
    return index, ((target - below) / weight).clamp(0.0, _BELOW_ONE)
