"""A scheduler with a model that has no weights, and adapters whose rows nobody writes."""

import itertools
from pathlib import Path

from engine.kvcache.block_pool import BlockPool
from engine.kvcache.cache_manager import CacheManager
from engine.kvcache.prefix_index import kv_root
from engine.lora.arena_allocator import ArenaAllocator
from engine.lora.residency import AdapterResidency
from engine.protocol import SamplingParams, SequenceOutput
from engine.scheduler.plan import SampledToken, StepPlan
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus

EOS = 999


class Adapters(AdapterResidency):
    """The real residency over an arena that has room for `max_resident` adapters of one row."""

    def __init__(self, *lora_ids, max_resident=100, clock=None):
        allocator = {"attention": ArenaAllocator(max_resident)}
        super().__init__(allocator=allocator, clock=clock or itertools.count().__next__)
        for lora_id in lora_ids:
            self.add_one(lora_id)

    def add_one(self, lora_id):
        self.add(
            lora_id,
            content_digest=f"sha256:{lora_id}",
            image=Path(lora_id),
            num_rows={"attention": 1},
            max_rank=1,
        )

    def load_next(self):
        """Begin and end the load of the oldest claimed absent version, if rows can be had."""
        load = self.next_load()
        if load is not None:
            self.loaded(load.lora_id)

    def make_resident(self, *lora_ids):
        for lora_id in lora_ids:
            self.claim(lora_id)
            self.load_next()
            self.unclaim(lora_id)

    def lora_index_of(self, lora_id):
        lease = self.lease(lora_id)
        self.release(lease)
        return lease.lora_index

    @property
    def claims(self):
        return {status.lora_id: status.num_claims for status in self.statuses()}

    @property
    def leases(self):
        return {status.lora_id: status.num_leases for status in self.statuses()}

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
    salt=None,
    **more,
):
    """A sequence with a cache of its own, unless it is given a salt; all prompts begin alike."""
    version, salt = lora_id, request_id if salt is None else salt
    params = {name: more.pop(name) for name in ("n", "num_prompt_logprobs") if name in more}
    return Sequence(
        request_id=request_id,
        token_ids=list(range(num_prompt_tokens)),
        num_prompt_tokens=num_prompt_tokens,
        params=SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
            **params,
        ),
        seed=0,
        eos_token_ids=(EOS,),
        lora_id=lora_id,
        cache_root=kv_root(base_identity="base", version=version, salt=salt),
        **more,
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


class KvModel:
    """What every slot would hold: the root and all tokens that its K and V depend on."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.blocks = {}

    def run(self, plan: StepPlan) -> None:
        """Copy, write, and check that every chunk meets its own past and nobody writes to it."""
        for copy in plan.block_copies:
            self.blocks[copy.target] = dict(self.blocks[copy.source])
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                block_id, offset = self.slot(chunk.sequence, position)
                if offset == 0:
                    self.blocks[block_id] = {}
                self.blocks[block_id][offset] = self.content(chunk.sequence, position)
        for chunk in plan.chunks:
            for position in range(chunk.start + chunk.num_tokens):
                block_id, offset = self.slot(chunk.sequence, position)
                assert self.blocks[block_id][offset] == self.content(chunk.sequence, position)

    def slot(self, seq, position):
        index, offset = divmod(position, self.block_size)
        return seq.block_table[index], offset

    def content(self, seq, position):
        return (seq.cache_root, *seq.token_ids[: position + 1])


def token_after(seq) -> int:
    """The fake model: the next token says how far its sequence is; samples differ by 100."""
    return 1000 + seq.num_tokens


def sample_all(plan: StepPlan, token_of=token_after) -> list[SampledToken]:
    return [
        SampledToken(token_id=token_of(chunk.sequence) + 100 * sample_index)
        for chunk in plan.chunks
        for sample_index in chunk.drawn_samples
    ]


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
