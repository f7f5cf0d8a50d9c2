"""What a scheduler is asked to keep to, and which sequences that leaves out."""

from dataclasses import dataclass

from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.kvcache.cache_manager import CacheManager
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of one scheduler; max_waiting_seqs isn't asked of what has started before."""

    max_num_seqs: int
    max_tokens_per_step: int
    max_model_len: int
    max_waiting_seqs: int

    @property
    def max_running_seqs(self) -> int:
        """Sequences that may run at once: each of them computes a token in every step."""
        return min(self.max_num_seqs, self.max_tokens_per_step)

    @property
    def max_requests(self) -> int:
        """Requests that there may be: a preempted one may wait although the queue is full."""
        return self.max_waiting_seqs + self.max_num_seqs

    def check(self, seq: Sequence, cache: CacheManager) -> None:
        """Raise an EngineError if `seq` could never be computed, however empty the engine."""
        if seq.num_prompt_tokens == 0:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if seq.params.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        if seq.params.n < 1:
            raise InvalidRequest("n must be at least 1", param="n")
        if seq.num_prompt_tokens >= self.max_model_len:
            raise ContextLengthExceeded(
                num_prompt_tokens=seq.num_prompt_tokens,
                max_tokens=seq.params.max_tokens,
                max_model_len=self.max_model_len,
            )
        # The last token is only sampled: its K and V are never needed.
        num_tokens = min(seq.num_prompt_tokens + seq.params.max_tokens, self.max_model_len) - 1
        if not cache.can_ever_hold(num_tokens):
            capacity = cache.pool.num_blocks * cache.block_size
            raise InvalidRequest(
                f"prompt and answer may need {num_tokens} tokens of KV cache, "
                f"but this worker has room for {capacity} in all",
                param="max_tokens",
                code="context_length_exceeded",
            )
