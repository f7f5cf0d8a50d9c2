"""What the sampler is told about one row of logits."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import SamplingParams

# Below it the most likely token is taken: a quotient by less says nothing else.
_GREEDY_BELOW_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """How one row is drawn.

    position            index in its sequence of the token being drawn
    sample_index        which of the request's samples
    token_ids           the sequence so far; read, never kept
    num_prompt_tokens   how many of them are the prompt's
    eos_token_ids       the model's end tokens, which `min_tokens` keeps away
    """

    params: SamplingParams
    seed: int
    position: int
    sample_index: int = 0
    token_ids: Sequence[int] = ()
    num_prompt_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.params.temperature < _GREEDY_BELOW_TEMPERATURE

    @property
    def may_not_end(self) -> bool:
        """Whether the answer has fewer tokens than it must have."""
        return len(self.token_ids) - self.num_prompt_tokens < self.params.min_tokens

    @property
    def is_adjusted(self) -> bool:
        """Whether anything but temperature and filters changes this row."""
        params = self.params
        return bool(
            params.logit_bias
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
            or self.may_not_end
        )
