"""The life of one sequence in the engine: tokens, blocks, and how far it is computed."""

from dataclasses import dataclass, field
from enum import Enum

from engine.protocol import SamplingParams


class SequenceStatus(Enum):
    """WAITING holds a claim, or the lease it was preempted with; RUNNING blocks and a lease.

    FINISHED holds nothing, at the latest when the step that computes it has been committed.
    """

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a sequence ended; the value goes on the wire."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One prompt and its answer. Only Scheduler writes to it; block_table is CacheManager's.

    There is no prefill and no decode: num_computed_tokens chases num_tokens.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    lora_id: str | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens whose K and V don't exist yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens
