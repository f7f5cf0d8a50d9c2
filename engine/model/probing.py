"""Whether an adapter does anything: one forward that holds the base twice and the adapter once."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.errors import AdapterConflict, EngineError, Overloaded, UnknownAdapter
from engine.kvcache.storage import KVStorage
from engine.lora.lifecycle import call_failed
from engine.lora.residency import AdapterResidency, Lease
from engine.model.decoder import Decoder
from engine.model.inputs import ChunkInput, LoraStep, StepInputs, slots_of
from engine.model.runner import ModelRunner
from engine.protocol import CallDone, Event, ProbeAdapter, ProbeResult
from punica_kernels.arena import Arena
from punica_kernels.plan import build_plan

NUM_TOKENS = 16
_NUM_ROWS = 3  # base, base again, adapter
_STRIDE = 2_654_435_761  # odd and large: neighbouring tokens of the probe are far apart


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """A probe that waits for its adapter's rows; it has a claim until it ends."""

    call_id: str
    lora_id: str
    deadline_s: float


class AdapterProber:
    """Answers ProbeAdapter calls: waits for the rows, computes one step of its own, lets go.

    Beside Scheduler the only one that claims and leases. Computes between steps, over a few KV
    blocks that nobody else sees, so that no request notices.
    """

    def __init__(
        self,
        *,
        residency: AdapterResidency,
        runner: ModelRunner,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        assert runner.arena is not None, "adapters live in an arena"
        self._residency = residency
        self._decoder = runner.decoder
        self._arena = runner.arena
        self._scratch = _scratch_kv(runner.kv)
        self._num_tokens = min(NUM_TOKENS, max_model_len)
        self._clock = clock
        self._waiting: list[_Probe] = []

    @property
    def is_busy(self) -> bool:
        """Whether a call has no answer yet."""
        return bool(self._waiting)

    def begin(self, call: ProbeAdapter) -> list[Event]:
        """Claim the adapter, which starts its load; the answer comes from advance()."""
        if not self._residency.knows(call.lora_id):
            error = UnknownAdapter(f"no adapter {call.lora_id!r} is loaded here")
            return [call_failed(call.call_id, error)]
        self._residency.claim(call.lora_id)
        deadline_s = self._clock() + call.timeout_s
        self._waiting.append(
            _Probe(call_id=call.call_id, lora_id=call.lora_id, deadline_s=deadline_s)
        )
        return []

    def advance(self) -> list[Event]:
        """Answer the calls whose adapters are there, or will never be, or not in time."""
        events: list[Event] = []
        for probe in list(self._waiting):
            if self._residency.is_draining(probe.lora_id):
                error = AdapterConflict(f"the adapter {probe.lora_id!r} was unloaded")
                events.append(self._give_up(probe, error))
            elif (lease := self._residency.lease(probe.lora_id)) is not None:
                events.append(self._answer(probe, lease))
            elif self._clock() >= probe.deadline_s:
                message = f"no rank rows could be had for {probe.lora_id!r} in time"
                events.append(self._give_up(probe, Overloaded(message, retry_after_s=1.0)))
        return events

    def load_failed(self, lora_id: str, error: EngineError) -> list[Event]:
        """Answer the calls for an adapter whose load has failed."""
        failed = [probe for probe in self._waiting if probe.lora_id == lora_id]
        return [self._give_up(probe, error) for probe in failed]

    def _answer(self, probe: _Probe, lease: Lease) -> Event:
        try:
            result = measure_effect(
                self._decoder,
                self._arena,
                self._scratch,
                lora_index=lease.lora_index,
                num_tokens=self._num_tokens,
            )
        finally:
            self._residency.release(lease)
            self._end(probe)
        return CallDone(call_id=probe.call_id, probe=result)

    def _give_up(self, probe: _Probe, error: EngineError) -> Event:
        self._end(probe)
        return call_failed(probe.call_id, error)

    def _end(self, probe: _Probe) -> None:
        self._waiting.remove(probe)
        self._residency.unclaim(probe.lora_id)


@torch.inference_mode()
def measure_effect(
    decoder: Decoder, arena: Arena, kv: KVStorage, *, lora_index: int, num_tokens: int
) -> ProbeResult:
    """Run one prompt three times in one step, and compare the logits of all its tokens.

    The gap between adapter and base must exceed the gap between two equal rows of the base, which
    is what the matrix library's own rounding makes of a row's place in the step.
    """
    token_ids = _probe_tokens(num_tokens, vocab_size=decoder.spec.vocab_size)
    for place, token_id in enumerate(_tokens_that_it_embeds(arena, lora_index, num_tokens // 2)):
        token_ids[2 * place] = token_id
    inputs = _inputs(token_ids, block_size=kv.block_size, device=kv.k.device)
    plan = build_plan([None, None, lora_index], [num_tokens] * _NUM_ROWS)
    assert plan is not None
    lora = LoraStep(arena=arena, plan=plan)
    hidden = decoder.forward(inputs, kv, lora)
    logits = decoder.head(hidden, lora).view(_NUM_ROWS, num_tokens, -1)
    noise = _largest(logits[1] - logits[0])
    logit_gap = _largest(logits[2] - logits[0])
    if not math.isfinite(logit_gap):
        return ProbeResult(has_effect=False, is_finite=False, logit_gap=0.0, noise=noise)
    return ProbeResult(
        has_effect=logit_gap > noise, is_finite=True, logit_gap=logit_gap, noise=noise
    )


def _probe_tokens(num_tokens: int, *, vocab_size: int) -> list[int]:
    """Return tokens from all over the vocabulary, always the same ones."""
    return [(1 + place * _STRIDE) % vocab_size for place in range(num_tokens)]


def _tokens_that_it_embeds(arena: Arena, lora_index: int, num_tokens: int) -> list[int]:
    """Return the tokens whose embeddings the adapter changes most; none if it leaves them alone.

    Training reaches only the tokens that it has met, so others would show nothing.
    """
    if num_tokens == 0 or not arena.carries("embedding", lora_index):
        return []
    (part,) = arena.weights("embedding", 0, lora_index).slices
    strength = torch.zeros(part.a_t.shape[0], device=part.a_t.device)  # [vocab]
    for row in part.a_t.t():
        strength += row.float().abs()
    token_ids: list[int] = strength.topk(num_tokens).indices.tolist()
    return token_ids


def _inputs(token_ids: Sequence[int], *, block_size: int, device: torch.device) -> StepInputs:
    """Return a step of the same prompt in every row, each with KV blocks of its own."""
    length = len(token_ids)
    num_blocks = -(-length // block_size)
    tables = [[row * num_blocks + block for block in range(num_blocks)] for row in range(_NUM_ROWS)]
    slots = [slot for table in tables for slot in slots_of(table, 0, length, block_size=block_size)]

    def tensor(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return StepInputs(
        token_ids=tensor([*token_ids] * _NUM_ROWS),
        positions=tensor([*range(length)] * _NUM_ROWS),
        kv_slots=tensor(slots),
        chunks=tuple(
            ChunkInput(
                row0=row * length, num_tokens=length, context_len=length, block_table=tables[row]
            )
            for row in range(_NUM_ROWS)
        ),
        sampled_rows=tensor(range(_NUM_ROWS * length)),
        begun_blocks=tensor([block for table in tables for block in table]),
    )


def _scratch_kv(kv: KVStorage) -> KVStorage:
    """Return storage like the engine's own, just large enough for a probe."""
    return KVStorage(
        num_layers=kv.num_layers,
        num_blocks=_NUM_ROWS * -(-NUM_TOKENS // kv.block_size),
        block_size=kv.block_size,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        dtype=kv.k.dtype,
        device=kv.k.device,
    )


def _largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())
