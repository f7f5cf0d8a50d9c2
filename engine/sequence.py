"""The life of one sequence in the engine: tokens, blocks, and how far it is computed."""

from dataclasses import dataclass, field
from enum import Enum

from engine.protocol import SamplingParams, TokenLogprob


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


@dataclass(slots=True, eq=False)
class SampleGroup:
    """The samples of one request that haven't given everything back. Only Scheduler writes.

    Together they have one claim or lease.
    """

    samples: list["Sequence"] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether every sample has ended."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self.samples)


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One prompt and one answer. Only Scheduler writes to it, but for block_table and _digests.

    There is no prefill and no decode: num_computed_tokens chases num_tokens. A request of n
    samples begins as one sequence; the others fork off it when its prompt is computed.

    cache_root         where its chain of digests begins: equal for equal weights and salt
    has_started        it has held blocks, or its prompt was computed for it
    block_digests      of its first full blocks, as far as anybody has asked
    num_cached_tokens  of the prompt; found in the cache when the request started
    prompt_logprobs    of prompt tokens 1, 2, … as far as computed
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    lora_id: str | None = None
    tenant: str = ""
    priority: int = 0
    cache_root: bytes = b""
    sample_index: int = 0
    has_started: bool = False
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    group: SampleGroup = field(default_factory=SampleGroup)

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

    @property
    def drawn_samples(self) -> range:
        """Which samples draw from its next logits: all of the request's at the first token."""
        if self.sample_index == 0 and self.num_generated_tokens == 0:
            return range(self.params.n)
        return range(self.sample_index, self.sample_index + 1)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the logits of its prompt are still to be computed, so that no cache will do."""
        has_all = self.sample_index > 0 or self.num_generated_tokens > 0
        return self.params.num_prompt_logprobs is not None and not has_all

    def fork(self, sample_index: int) -> "Sequence":
        """Return another sample of the same prompt: it waits, and holds nothing yet."""
        assert self.num_generated_tokens == 0, "samples part at the first token"
        return Sequence(
            request_id=self.request_id,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            params=self.params,
            seed=self.seed,
            eos_token_ids=self.eos_token_ids,
            lora_id=self.lora_id,
            tenant=self.tenant,
            priority=self.priority,
            cache_root=self.cache_root,
            sample_index=sample_index,
            has_started=True,
            num_cached_tokens=self.num_cached_tokens,
            block_digests=list(self.block_digests),
            group=self.group,
        )
