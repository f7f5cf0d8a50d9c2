"""The largest logit of each row, and where it stands."""

import torch
from torch import Tensor

_PART = 128  # logits whose maximum is taken by vectors; divides the common vocabularies


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return values [num_rows] and first places [num_rows] of the largest of [num_rows, vocab].

    A NaN anywhere in a row is its largest. On a CPU torch looks for a place one element at a time:
    here it does so among the maxima of parts, and in the one part that has the row's.
    """
    num_rows, vocab = logits.shape
    if logits.device.type != "cpu" or vocab % _PART != 0:
        found = logits.max(dim=-1)
        return found.values, found.indices
    parts = logits.view(num_rows, vocab // _PART, _PART)
    best = parts.amax(dim=-1).max(dim=-1)
    inside = parts[torch.arange(num_rows), best.indices].argmax(dim=-1)
    return best.values, best.indices * _PART + inside
