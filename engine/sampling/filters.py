"""Min-p, top-k and top-p: which tokens may be drawn.

All keep or drop tokens of equal probability together, so that what is kept depends on values
only, never on the order in which a sort leaves equals.
"""

import math

import torch
from torch import Tensor

from engine.transfer import upload

# Most nuclei are far smaller than the vocabulary: a partial sort of few tokens finds them, at a
# tenth of a full sort's cost. Where it doesn't, it is done again for that many times more.
_NUM_FIRST_CANDIDATES = 64
_GROWTH = 8


def keep_min_p(logits: Tensor, min_p: list[float]) -> Tensor:
    """Return logits [num_rows, vocab], 0 the largest of each row, with -inf where unlikely.

    That is, where a token is less than min_p times as likely as the likeliest; 0 keeps all.
    """
    if not any(p > 0.0 for p in min_p):
        return logits
    logs = [[math.log(p) if p > 0.0 else -math.inf] for p in min_p]
    limit = upload(logs, dtype=logits.dtype, device=logits.device)  # [num_rows, 1]
    return logits.masked_fill(logits < limit, -torch.inf)


def keep_top_k(logits: Tensor, top_k: list[int]) -> Tensor:
    """Return logits [num_rows, vocab] with -inf below each row's k-th largest; k 0 keeps all."""
    vocab = logits.shape[-1]
    filtered = [row for row, k in enumerate(top_k) if 0 < k < vocab]
    if not filtered:
        return logits
    largest = max(top_k[row] for row in filtered)
    places = [[top_k[row] - 1] for row in filtered]
    last = upload(places, dtype=torch.int64, device=logits.device)  # [num_filtered, 1]
    best = _take_rows(logits, filtered).topk(largest, dim=-1).values  # [num_filtered, largest]
    threshold = _spread(best.gather(-1, last), filtered, num_rows=len(top_k), other=-torch.inf)
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(probs: Tensor, top_p: list[float]) -> Tensor:
    """Return probs [num_rows, vocab] with 0 outside each row's nucleus; p 1 keeps all.

    The nucleus is the smallest set of most likely tokens whose sum reaches p: the token that
    crosses p is in it. What is left isn't scaled up to 1.
    """
    filtered = [row for row, p in enumerate(top_p) if p < 1.0]
    if not filtered:
        return probs
    sums = [[top_p[row]] for row in filtered]
    limit = upload(sums, dtype=torch.float64, device=probs.device)  # [num_filtered, 1]
    crossing = _nucleus_threshold(_take_rows(probs, filtered), limit)
    threshold = _spread(crossing, filtered, num_rows=len(top_p), other=0.0)
    return probs.masked_fill(probs < threshold, 0.0)


def _take_rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """Return some rows of tensor [num_rows, n], in order; all of them uncopied."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor[upload(rows, dtype=torch.int64, device=tensor.device)]


def _spread(values: Tensor, rows: list[int], *, num_rows: int, other: float) -> Tensor:
    """Return values [len(rows), 1] at their rows of [num_rows, 1], and `other` between them."""
    if len(rows) == num_rows:
        return values
    index = upload(rows, dtype=torch.int64, device=values.device)
    return values.new_full((num_rows, 1), other).index_copy(0, index, values)


def _nucleus_threshold(probs: Tensor, limit: Tensor) -> Tensor:
    """Return the probability of the token that crosses limit [num_rows, 1], as [num_rows, 1]."""
    if probs.device.type == "cpu":
        return _threshold_among_candidates(probs, limit)
    # A device sorts a whole vocabulary sooner than it could say whether candidates were enough.
    ordered = probs.sort(dim=-1, descending=True).values
    return ordered.gather(-1, _crossing(ordered, limit).clamp(max=probs.shape[-1] - 1))


def _threshold_among_candidates(probs: Tensor, limit: Tensor) -> Tensor:
    """Do the same with as few sorted tokens as it takes; looks after each try if that was it."""
    num_rows, vocab = probs.shape
    num_candidates = min(_NUM_FIRST_CANDIDATES, vocab)
    threshold = torch.empty(num_rows, 1, dtype=probs.dtype)
    open_rows = torch.arange(num_rows)
    while open_rows.numel():
        asked = probs if len(open_rows) == num_rows else probs[open_rows]
        candidates = asked.topk(num_candidates, dim=-1).values
        crossing = _crossing(candidates, limit[open_rows])
        threshold[open_rows] = candidates.gather(-1, crossing.clamp(max=num_candidates - 1))
        if num_candidates == vocab:
            break
        open_rows = open_rows[(crossing == num_candidates).squeeze(-1)]  # p isn't reached yet
        num_candidates = min(num_candidates * _GROWTH, vocab)
    return threshold


def _crossing(ordered: Tensor, limit: Tensor) -> Tensor:
    """Return where the sum of ordered [num_rows, n] reaches limit: [num_rows, 1], n for nowhere."""
    return (ordered.cumsum(-1, dtype=torch.float64) < limit).sum(-1, keepdim=True)
