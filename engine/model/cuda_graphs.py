"""Decode steps captured once as CUDA graphs and replayed with other numbers."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, Self, TypeVar

import torch

from engine.kvcache.storage import KVStorage
from engine.model.decoder import Decoder
from engine.model.inputs import LoraStep, StepInputs
from engine.model.step_kernels import KernelStep

logger = logging.getLogger("loraplex.model")

MAX_SHAPES = 256  # that are remembered, captured or met once; most steps fall into a few
_PADDING_SLOT = -1


class StepTables(Protocol):
    """The small tensors that a step's launches read beside its rows."""

    @property
    def shape(self) -> Hashable:
        """What a captured graph is fixed to: tables of one shape may take each other's place."""

    def take(self, other: Self) -> None:
        """Become `other` in place; both have one shape."""


Tables = TypeVar("Tables", bound=StepTables)


class GraphableKernels(Protocol[Tables]):
    """Kernels whose planning is apart from their launches, so that a graph can hold the latter."""

    def plan(self, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None) -> Tables:
        """Do all of a step that the host decides."""

    def step(
        self,
        plan: Tables,
        kv: KVStorage,
        lora: LoraStep | None,
        *,
        positions: torch.Tensor,
        kv_slots: torch.Tensor,
    ) -> KernelStep:
        """Begin a step that is planned; rows whose slot is -1 are padding and write nothing."""


class CapturedGraph(Protocol):
    """Launches that can be made again.

    result   what the captured call returned; each replay writes to it anew
    """

    @property
    def result(self) -> torch.Tensor: ...

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], torch.Tensor]], CapturedGraph]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The inputs of a bucket, where its graphs read them: [num_rows] int64 each."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor

    @classmethod
    def of(cls, num_rows: int, device: torch.device) -> Self:
        """Return padding only."""
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return cls(
            token_ids=zeros,
            positions=zeros.clone(),
            kv_slots=torch.full_like(zeros, _PADDING_SLOT),
        )

    def take(self, inputs: StepInputs) -> None:
        """Become the rows of a step, and padding behind them."""
        num_rows = inputs.num_tokens
        self.token_ids[:num_rows] = inputs.token_ids
        self.positions[:num_rows] = inputs.positions
        self.kv_slots[:num_rows] = inputs.kv_slots
        self.kv_slots[num_rows:] = _PADDING_SLOT


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph(Generic[Tables]):
    captured: CapturedGraph
    tables: Tables


class DecodeGraphs(Generic[Tables]):
    """Runs steps in which every chunk is one token by replaying graphs; others it leaves alone.

    A step is padded to a bucket of rows: a power of two, or max_num_seqs. Its tables are padded
    by whoever plans them. A shape that is met for the first time is left to the ordinary way, which
    compiles its kernels; the second time it is captured. Graphs whose tables have been replaced
    have a shape that doesn't come again, and are forgotten as the least recently used.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        kernels: GraphableKernels[Tables],
        kv: KVStorage,
        max_num_seqs: int,
        capture: Capture,
    ) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._capture = capture
        self._rows: dict[int, _Rows] = {}
        # The least recently used first; None is a shape that was met once.
        self._graphs: OrderedDict[Hashable, _Graph[Tables] | None] = OrderedDict()
        self._is_off = False
        self.num_replays = 0

    @property
    def num_graphs(self) -> int:
        """How many are captured."""
        return sum(graph is not None for graph in self._graphs.values())

    def forward(
        self, inputs: StepInputs, lora: LoraStep | None
    ) -> torch.Tensor | None:  # [num_tokens, hidden]
        """Do what Decoder.forward does, or return None: this step must go the ordinary way.

        The result is overwritten by the next step.
        """
        if self._is_off or not is_decode(inputs, max_num_seqs=self._max_num_seqs):
            return None
        if lora is not None and adapts_embedding(lora):
            return None  # its lookups are made by the host, segment by segment
        num_rows = bucket_of(inputs.num_tokens, max_num_seqs=self._max_num_seqs)
        padded = None if lora is None else _padded(lora, num_rows)
        tables = self._kernels.plan(inputs, self._kv, padded)
        key = (num_rows, tables.shape)
        if key not in self._graphs:
            self._remember(key, None)
            return None
        rows = self._rows_of(num_rows)
        rows.take(inputs)
        graph = self._graphs[key]
        if graph is None:
            graph = self._captured(rows, tables, padded)
            if graph is None:
                return None
        else:
            graph.tables.take(tables)
        self._remember(key, graph)
        graph.captured.replay()
        self.num_replays += 1
        return graph.captured.result[: inputs.num_tokens]

    def _captured(
        self, rows: _Rows, tables: Tables, lora: LoraStep | None
    ) -> _Graph[Tables] | None:
        def run() -> torch.Tensor:
            step = self._kernels.step(
                tables, self._kv, lora, positions=rows.positions, kv_slots=rows.kv_slots
            )
            return self._decoder.run(step, rows.token_ids, lora)

        try:
            return _Graph(captured=self._capture(run), tables=tables)
        except RuntimeError as error:  # what torch raises for all that CUDA objects to
            logger.warning("decode steps go on without CUDA graphs; a capture failed: %s", error)
            self._is_off = True
            self._graphs.clear()
            return None

    def _rows_of(self, num_rows: int) -> _Rows:
        if num_rows not in self._rows:
            self._rows[num_rows] = _Rows.of(num_rows, self._kv.k.device)
        return self._rows[num_rows]

    def _remember(self, key: Hashable, graph: _Graph[Tables] | None) -> None:
        self._graphs[key] = graph
        self._graphs.move_to_end(key)
        while len(self._graphs) > MAX_SHAPES:
            self._graphs.popitem(last=False)


def is_decode(inputs: StepInputs, *, max_num_seqs: int) -> bool:
    """Say whether a step has one token of each of its sequences, and not too many of them."""
    return len(inputs.chunks) == inputs.num_tokens <= max_num_seqs


def bucket_of(num_rows: int, *, max_num_seqs: int) -> int:
    """Return the rows of the graph that takes so many: a power of two, or all there can be."""
    return min(1 << (num_rows - 1).bit_length(), max_num_seqs)


def adapts_embedding(lora: LoraStep) -> bool:
    """Say whether an adapter of the step changes the embedding."""
    carriers = {segment.lora_index for segment in lora.plan.segments}
    return any(lora.arena.carries("embedding", lora_index) for lora_index in carriers)


def _padded(lora: LoraStep, num_rows: int) -> LoraStep:
    return replace(lora, plan=replace(lora.plan, num_tokens=num_rows))


class CudaCapture:
    """Captures graphs on a CUDA device; all share one pool, as no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        """Run once, so that everything is compiled and allocated; then capture.

        A step writes the same K and V to the same cells however often it runs.
        """
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()
        return _CudaGraph(graph=graph, result=result)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CudaGraph:
    graph: torch.cuda.CUDAGraph
    result: torch.Tensor

    def replay(self) -> None:
        self.graph.replay()
