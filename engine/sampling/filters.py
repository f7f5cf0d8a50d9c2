"""Min-p, top-k and top-p: which tokens may be drawn.

All keep or drop tokens of equal probability together, so that what is kept depends on values
only, never on the order in which a sort leaves equals.
"""

import math

import torch
from torch import Tensor

# Most nuclei are far smaller than the vocabulary: a partial sort of few tokens finds them, at a
# tenth of a full sort's cost. Where it doesn't, it is done again for that many times more.
_NUM_FIRST_CANDIDATES = 64
_GROWTH = 8


def keep_min_p(logits: Tensor, min_p: list[float]) -> Tensor:
    """Return logits [num_rows, vocab], 0 the largest of each row, with -inf where unlikely.

    That is, where a token is less than min_p times as likely as the likeliest; 0 keeps all.
    """
    filtered = [row for row, p in enumerate(min_p) if p > 0.0]
    if not filtered:
        return logits
    rows = torch.tensor(filtered, device=logits.device)  # [num_filtered]
    limit = torch.tensor([[math.log(min_p[row])] for row in filtered], device=logits.device)
    chosen = logits[rows]  # [num_filtered, vocab]
    return logits.index_copy(0, rows, chosen.masked_fill(chosen < limit, -torch.inf))


def keep_top_k(logits: Tensor, top_k: list[int]) -> Tensor:
    """Return logits [num_rows, vocab] with -inf below each row's k-th largest; k 0 keeps all."""
    vocab = logits.shape[-1]
    limits = [k if 0 < k < vocab else vocab for k in top_k]
    filtered = [row for row, k in enumerate(limits) if k < vocab]
    if not filtered:
        return logits
    largest = max(limits[row] for row in filtered)
    rows = torch.tensor(filtered, device=logits.device)  # [num_filtered]
    last = torch.tensor([[limits[row] - 1] for row in filtered], device=logits.device)
    chosen = logits[rows]  # [num_filtered, vocab]
    threshold = chosen.topk(largest, dim=-1).values.gather(-1, last)  # [num_filtered, 1]
    return logits.index_copy(0, rows, chosen.masked_fill(chosen < threshold, -torch.inf))


def keep_top_p(probs: Tensor, top_p: list[float]) -> Tensor:
    """Return probs [num_rows, vocab] with 0 outside each row's nucleus; p 1 keeps all.

    The nucleus is the smallest set of most likely tokens whose sum reaches p: the token that
    crosses p is in it. What is left isn't scaled up to 1.
    """
    filtered = [row for row, p in enumerate(top_p) if p < 1.0]
    if not filtered:
        return probs
    rows = torch.tensor(filtered, device=probs.device)  # [num_filtered]
    limit = torch.tensor(
        [[top_p[row]] for row in filtered], dtype=torch.float64, device=probs.device
    )
    chosen = probs[rows]  # [num_filtered, vocab]
    threshold = _nucleus_threshold(chosen, limit)
    return probs.index_copy(0, rows, chosen.masked_fill(chosen < threshold, 0.0))


def _nucleus_threshold(probs: Tensor, limit: Tensor) -> Tensor:
    """Return the probability of the token that crosses limit [num_rows, 1], as [num_rows, 1]."""
    num_rows, vocab = probs.shape
    num_candidates = min(_NUM_FIRST_CANDIDATES, vocab)
    threshold = torch.empty(num_rows, 1, dtype=probs.dtype, device=probs.device)
    open_rows = torch.arange(num_rows, device=probs.device)
    while open_rows.numel():
        candidates = probs[open_rows].topk(num_candidates, dim=-1).values
        sums = candidates.cumsum(-1, dtype=torch.float64)  # [num_open, num_candidates]
        crossing = (sums < limit[open_rows]).sum(-1, keepdim=True)  # [num_open, 1]
        last = crossing.clamp(max=num_candidates - 1)
        threshold[open_rows] = candidates.gather(-1, last)
        if num_candidates == vocab:
            break
        open_rows = open_rows[(crossing == num_candidates).squeeze(-1)]  # p isn't reached yet
        num_candidates = min(num_candidates * _GROWTH, vocab)
    return threshold
