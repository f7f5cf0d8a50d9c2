"""A scheduler with a model that has no weights, and adapters that have no rows."""

from collections import Counter
from dataclasses import dataclass

from engine.kvcache.block_pool import BlockPool
from engine.kvcache.cache_manager import CacheManager
from engine.protocol import SamplingParams, SequenceOutput
from engine.scheduler.plan import SampledToken, StepPlan
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus

EOS = 999


@dataclass(frozen=True, slots=True)
class FakeLease:
    lora_id: str
    lora_index: int


class FakeResidency:
    """Adapters that become resident when told to, or by next_load under a limit of rows."""

    def __init__(self, *lora_ids, max_resident=100):
        self.known = list(lora_ids)
        self.resident = set()
        self.claims = Counter()
        self.leases = Counter()
        self.max_resident = max_resident
        self._claim_order = []

    def knows(self, lora_id):
        return lora_id in self.known

    def claim(self, lora_id):
        assert self.knows(lora_id), "no claim on an unknown or draining version"
        if self.claims[lora_id] == 0:
            self._claim_order.append(lora_id)
        self.claims[lora_id] += 1

    def unclaim(self, lora_id):
        assert self.claims[lora_id] > 0
        self.claims[lora_id] -= 1
        if self.claims[lora_id] == 0:
            self._claim_order.remove(lora_id)

    def lease(self, lora_id):
        if lora_id not in self.resident or not self.knows(lora_id):
            return None
        self.leases[lora_id] += 1
        return FakeLease(lora_id, self.known.index(lora_id))

    def release(self, lease):
        assert self.leases[lease.lora_id] > 0
        self.leases[lease.lora_id] -= 1

    def is_evictable(self, lora_id):
        return self.leases[lora_id] == 0 and self.claims[lora_id] == 0

    def load_next(self):
        """Make the oldest claimed absent version resident, if a place can be had."""
        for lora_id in self._claim_order:
            if lora_id in self.resident:
                continue
            if len(self.resident) >= self.max_resident:
                evictable = sorted(filter(self.is_evictable, self.resident))
                if not evictable:
                    return
                self.resident.discard(evictable[0])
            self.resident.add(lora_id)
            return

    def forget(self, lora_id):
        self.known[self.known.index(lora_id)] = None
        self.resident.discard(lora_id)

    @property
    def num_holds(self):
        return sum(self.claims.values()) + sum(self.leases.values())


def make_sequence(
    request_id="r",
    *,
    num_prompt_tokens=4,
    max_tokens=4,
    lora_id=None,
    ignore_eos=False,
    stop_token_ids=(),
):
    return Sequence(
        request_id=request_id,
        token_ids=list(range(num_prompt_tokens)),
        num_prompt_tokens=num_prompt_tokens,
        params=SamplingParams(
            max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids
        ),
        seed=0,
        eos_token_ids=(EOS,),
        lora_id=lora_id,
    )


def make_scheduler(
    *,
    num_blocks=100,
    block_size=4,
    max_num_seqs=8,
    max_tokens_per_step=64,
    max_model_len=64,
    residency=None,
    **limits,
):
    return Scheduler(
        max_num_seqs=max_num_seqs,
        max_tokens_per_step=max_tokens_per_step,
        max_model_len=max_model_len,
        cache=CacheManager(BlockPool(num_blocks), block_size=block_size),
        residency=residency,
        **limits,
    )


def token_after(seq) -> int:
    """The fake model: the next token says who asks, and how far they are."""
    return 1000 + seq.num_tokens


def sample_all(plan: StepPlan, token_of=token_after) -> dict[int, SampledToken]:
    return {
        position: SampledToken(token_id=token_of(chunk.sequence))
        for position, chunk in enumerate(plan.chunks)
        if chunk.samples
    }


def step(scheduler, token_of=token_after) -> list[SequenceOutput]:
    """Plan, compute and commit one step; nothing comes back if nothing can be computed."""
    plan = scheduler.plan_step()
    if plan is None:
        return []
    outputs = scheduler.commit(plan, sample_all(plan, token_of))
    scheduler.check_invariants()
    return outputs


def run_to_end(scheduler, *, residency=None, max_steps=10_000) -> list[SequenceOutput]:
    outputs = []
    for _ in range(max_steps):
        if not scheduler.has_work:
            return outputs
        if residency is not None:
            residency.load_next()
        outputs += step(scheduler)
    raise AssertionError("the scheduler doesn't come to an end")


def is_over(seq) -> bool:
    return seq.status is SequenceStatus.FINISHED
