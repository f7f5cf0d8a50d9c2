"""What a step computes, and what comes back from it."""

from dataclasses import dataclass

from engine.kvcache.cache_manager import BlockCopy, CacheManager
from engine.protocol import TokenLogprob
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of one sequence's tokens, [start, start + num_tokens), in one step.

    samples      the chunk reaches the sequence's last token, so its last logits are needed
    lora_index   None is the base
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    lora_index: int | None

    @property
    def drawn_samples(self) -> range:
        """Which samples draw a token from its last logits; all of the request's at the first."""
        return self.sequence.drawn_samples if self.samples else range(0)

    @property
    def num_prompt_logits(self) -> int:
        """Rows, from the first one on, whose logits say how likely the prompt was."""
        if not self.sequence.wants_prompt_logprobs:
            return 0
        return max(min(self.num_tokens, self.sequence.num_prompt_tokens - 1 - self.start), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The chunks of one step: base first, then each adapter's in one contiguous run.

    block_copies   to be made before anything is written; no target is a source
    """

    chunks: tuple[Chunk, ...]
    block_copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_adapters(self) -> int:
        """Different adapters in this step; the base is none."""
        return len({chunk.lora_index for chunk in self.chunks} - {None})

    def has(self, seq: Sequence) -> bool:
        """Whether a chunk of `seq` is in this step."""
        return any(chunk.sequence is seq for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """What was drawn for one sample.

    token_id   None if the logits were not finite: nothing can be drawn from them
    logprobs   when asked for: the drawn token first, then the most likely ones in falling order
    """

    token_id: int | None
    logprobs: list[TokenLogprob] | None = None


class PlanBuilder:
    """Collects the chunks of one step under its token budget; lives for that step only."""

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens_left = max_tokens
        self._chunks: list[Chunk] = []

    def add(self, seq: Sequence, lora_index: int | None) -> None:
        """Give `seq` all of its missing tokens, or what is left of the budget."""
        num_tokens = min(seq.num_missing_tokens, self.num_tokens_left)
        assert num_tokens > 0, f"{seq.request_id} would get an empty chunk"
        self.num_tokens_left -= num_tokens
        self._chunks.append(
            Chunk(
                sequence=seq,
                start=seq.num_computed_tokens,
                num_tokens=num_tokens,
                samples=num_tokens == seq.num_missing_tokens,
                lora_index=lora_index,
            )
        )

    def build(self, cache: CacheManager) -> StepPlan:
        """Return the plan, its chunks ordered by adapter, else in the order of addition."""
        ordered = sorted(
            self._chunks,
            key=lambda chunk: -1 if chunk.lora_index is None else chunk.lora_index,
        )
        copies = cache.copies_for(chunk.sequence for chunk in ordered)
        return StepPlan(chunks=tuple(ordered), block_copies=copies)
