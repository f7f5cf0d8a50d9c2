"""Random models, adapters and steps on a device, in the shapes of real ones; needs torch alone."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from engine.kvcache.storage import KVStorage
from engine.model.decoder import Decoder
from engine.model.inputs import ChunkInput, StepInputs
from engine.model.layers import LayerWeights
from engine.model.linear import PackedLinear, unpacked
from engine.model.spec import ModelSpec, spec_from_hf_config
from engine.model.step_kernels import StepKernels
from punica_kernels.arena import Arena, ModuleSpec, Span

BLOCK_SIZE = 16
_REPEATS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The extents of a Llama."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int

    def spec(self) -> ModelSpec:
        return spec_from_hf_config(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "num_hidden_layers": self.num_layers,
                "hidden_size": self.hidden,
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "intermediate_size": self.intermediate,
                "vocab_size": self.vocab_size,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
        )

    def modules(self) -> list[ModuleSpec]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = (
            ("qkv", "attention", self.hidden, (q, kv, kv)),
            ("o", "attention", q, (self.hidden,)),
            ("gate_up", "mlp", self.hidden, (self.intermediate, self.intermediate)),
            ("down", "mlp", self.intermediate, (self.hidden,)),
        )
        return [
            ModuleSpec(name=name, group=group, in_features=width, slice_out_features=slices)
            for name, group, width, slices in parts
        ]


SMALL = Shape(
    name="1B",
    num_layers=16,
    hidden=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    intermediate=8192,
    vocab_size=32_000,
)
LARGE = Shape(
    name="8B",
    num_layers=32,
    hidden=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab_size=32_000,
)
TINY = Shape(
    name="tiny",
    num_layers=2,
    hidden=48,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    intermediate=64,
    vocab_size=64,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where and at which size everything runs. Dry is the interpreter's: it starts, no more."""

    device: torch.device
    dry: bool

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (TINY,) if self.dry else (SMALL, LARGE)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def randn(self, *shape: int, std: float = 1.0) -> Tensor:
        """Return random numbers of this device: the same ones in every run."""
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=std)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the median seconds of a call that is captured once and replayed.

        What Python and the driver take is left out, as it is where an engine replays its graphs.
        """
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles what isn't yet
            call()
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return _median_seconds(graph.replay)

    def eager_seconds(self, call: Callable[[], object]) -> float:
        """Return the median seconds of a call on a CUDA device that isn't captured.

        What the host takes counts where the device has to wait for it.
        """
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        return _median_seconds(call)


def _median_seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return median(times)


def random_decoder(
    world: World, shape: Shape, make_kernels: Callable[..., StepKernels], seed: int = 0
) -> Decoder:
    """Return a Llama whose weights are drawn anew from `seed`, so that two can be compared."""
    torch.manual_seed(seed)

    def linear(out_features: Sequence[int], in_features: int) -> PackedLinear:
        weight = world.randn(sum(out_features), in_features, std=in_features**-0.5)
        return PackedLinear(weight=weight, bias=None, slice_out_features=tuple(out_features))

    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    ones = torch.ones(shape.hidden, dtype=world.dtype, device=world.device)
    layers = [
        LayerWeights(
            input_norm=ones,
            qkv=linear((q, kv, kv), shape.hidden),
            qk_norm=None,
            o=linear((shape.hidden,), q),
            post_attention_norm=ones,
            gate_up=linear((shape.intermediate, shape.intermediate), shape.hidden),
            down=linear((shape.hidden,), shape.intermediate),
        )
        for _ in range(shape.num_layers)
    ]
    embedding = world.randn(shape.vocab_size, shape.hidden)
    return Decoder(
        spec=shape.spec(),
        embedding=embedding,
        layers=layers,
        final_norm=ones,
        head=unpacked(embedding),
        max_model_len=2048,
        make_kernels=make_kernels,
    )


def random_arena(
    world: World, shape: Shape, ranks: Sequence[int], *, num_layers: int | None = None
) -> Arena:
    """Return an arena with one random adapter of each rank, on every module."""
    modules, rows = shape.modules(), sum(ranks)
    arena = Arena(
        modules=modules,
        num_layers=num_layers or shape.num_layers,
        num_rows={"attention": rows, "mlp": rows},
        dtype=world.dtype,
        device=world.device,
    )
    for module in modules:
        arena.a(module.name).normal_(std=module.in_features**-0.5)
        arena.b(module.name).normal_(std=0.02)
    row0 = 0
    for lora_index, rank in enumerate(ranks):
        set_adapter(arena, lora_index, Span(row0=row0, num_rows=rank))
        row0 += rank
    return arena


def set_adapter(arena: Arena, lora_index: int, span: Span) -> None:
    """Make an index mean the rows of `span`, in full, everywhere."""
    ranks = {
        module.name: [[span.num_rows] * module.num_slices] * arena.num_layers
        for module in arena.modules
    }
    spans = {"attention": span, "mlp": span}
    arena.set_adapter(lora_index, spans=spans, ranks=ranks, scales=ranks)


def kv_storage(world: World, shape: Shape, num_blocks: int) -> KVStorage:
    """Return KV cells with random numbers in them."""
    kv = KVStorage(
        num_layers=shape.num_layers,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=world.dtype,
        device=world.device,
    )
    kv.k.normal_()
    kv.v.normal_()
    return kv


def step_inputs(world: World, chunks: Sequence[tuple[int, int]], vocab_size: int) -> StepInputs:
    """Return a step of chunks (num_tokens, context_len) whose blocks follow each other."""
    inputs: list[ChunkInput] = []
    positions: list[int] = []
    slots: list[int] = []
    block0 = 0
    for num_tokens, context_len in chunks:
        num_blocks = -(-context_len // BLOCK_SIZE)
        inputs.append(
            ChunkInput(
                row0=len(positions),
                num_tokens=num_tokens,
                context_len=context_len,
                block_table=range(block0, block0 + num_blocks),
            )
        )
        mine = range(context_len - num_tokens, context_len)
        positions += mine
        slots += [block0 * BLOCK_SIZE + position for position in mine]
        block0 += num_blocks
    generator = torch.Generator().manual_seed(len(positions))
    token_ids = torch.randint(vocab_size, (len(positions),), generator=generator)

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=world.device)

    return StepInputs(
        token_ids=token_ids.to(world.device),
        positions=on_device(positions),
        kv_slots=on_device(slots),
        chunks=tuple(inputs),
        sampled_rows=on_device([]),
        begun_blocks=None,
    )
