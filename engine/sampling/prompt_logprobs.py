"""Log probabilities of the tokens of prompts, gathered from the tiles of one step."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from engine.protocol import TokenLogprob
from engine.sampling.logprobs import token_logprobs


class PromptLogprobs:
    """What one step says about its prompts; lives for that step only."""

    def __init__(self) -> None:
        self._found: dict[int, list[list[TokenLogprob]]] = {}

    @property
    def by_position(self) -> Mapping[int, Sequence[list[TokenLogprob]]]:
        """Entries in the order of the tokens, by the position of their chunk in the plan."""
        return self._found

    def add(
        self, position: int, logits: Tensor, *, next_token_ids: Sequence[int], num_top: int
    ) -> None:
        """Take logits [num_rows, vocab] of a chunk, which follow those of the last call for it.

        next_token_ids  what really came after each row
        """
        entries = token_logprobs(logits, next_token_ids, [num_top] * len(next_token_ids))
        self._found.setdefault(position, []).extend(entries)
