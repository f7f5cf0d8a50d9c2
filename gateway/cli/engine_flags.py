"""The options of `serve` and `worker`, each also an environment variable LORAPLEX_*."""

from pathlib import Path
from typing import Annotated

import typer


def _variable(name: str) -> str:
    return "LORAPLEX_" + name.upper().replace("-", "_")


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        envvar=_variable("model"),
        help="A local HF directory, a .gguf file or a hub id; nothing for the default base.",
    ),
]
AdapterFlag = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="NAME=PATH", help="Push this adapter at start; repeatable."),
]
HostFlag = Annotated[str, typer.Option("--host", envvar=_variable("host"))]
PortFlag = Annotated[
    int,
    typer.Option("--port", envvar=_variable("port"), min=0, max=65535, help="0 takes a free one."),
]
ServerApiKeyFlag = Annotated[
    str | None,
    typer.Option("--api-key", envvar=_variable("api-key"), help="Opens the inference routes."),
]
ServerAdminKeyFlag = Annotated[
    str | None,
    typer.Option("--admin-key", envvar=_variable("admin-key"), help="Opens every route."),
]
MaxModelLenFlag = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        envvar=_variable("max-model-len"),
        min=2,
        help="Tokens of prompt and answer together; by default the checkpoint's.",
    ),
]
MaxNumSeqsFlag = Annotated[
    int,
    typer.Option(
        "--max-num-seqs",
        envvar=_variable("max-num-seqs"),
        min=1,
        help="Most sequences in a step.",
    ),
]
MaxTokensPerStepFlag = Annotated[
    int,
    typer.Option(
        "--max-tokens-per-step",
        envvar=_variable("max-tokens-per-step"),
        min=1,
        help="Most tokens that a step computes.",
    ),
]
MemoryFlag = Annotated[
    str | None,
    typer.Option(
        "--memory",
        envvar=_variable("memory"),
        metavar="SIZE",
        help="For each worker's KV blocks and adapters, like 2GiB; by default measured, and "
        "divided by the workers of one machine or CUDA device.",
    ),
]
BlockSizeFlag = Annotated[
    int,
    typer.Option(
        "--block-size", envvar=_variable("block-size"), min=1, help="Tokens in a KV block."
    ),
]
NumThreadsFlag = Annotated[
    int | None,
    typer.Option(
        "--num-threads",
        envvar=_variable("num-threads"),
        min=1,
        help="Threads of each worker's products; by default all cores, shared by local workers.",
    ),
]
SchedulingFlag = Annotated[
    str,
    typer.Option(
        "--scheduling",
        envvar=_variable("scheduling"),
        help="fair (by priority, then least served) or fcfs.",
    ),
]
DtypeFlag = Annotated[
    str,
    typer.Option("--dtype", envvar=_variable("dtype"), help="auto, bf16 or fp32."),
]
DeviceFlag = Annotated[
    str,
    typer.Option(
        "--device",
        envvar=_variable("device"),
        help="cpu or cuda; several workers are dealt over the visible CUDA devices in turn.",
    ),
]
AttentionFlag = Annotated[
    str,
    typer.Option(
        "--attention",
        envvar=_variable("attention"),
        help="On CUDA: auto (FlashInfer's where it is installed and fits), triton or flashinfer.",
    ),
]
WorkersFlag = Annotated[
    int,
    typer.Option("--workers", envvar=_variable("workers"), min=1, max=64, help="Local workers."),
]
RedisUrlFlag = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar=_variable("redis-url"),
        help="A running Redis or Valkey instead of a private one.",
    ),
]
StoreFlag = Annotated[
    Path | None,
    typer.Option(
        "--store",
        envvar=_variable("store"),
        help="Where adapter versions are kept; by default in the state folder.",
    ),
]
ServedModelNameFlag = Annotated[
    str | None,
    typer.Option(
        "--served-model-name",
        envvar=_variable("served-model-name"),
        help="Public id of the base; by default the checkpoint's own name.",
    ),
]
StateDirFlag = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        envvar=_variable("state-dir"),
        help="Where this server keeps what outlives a run.",
    ),
]
AllowedRootFlag = Annotated[
    list[Path] | None,
    typer.Option(
        "--allowed-root",
        envvar=_variable("allowed-root"),
        help="A directory from which uploads by path may read; repeatable.",
    ),
]
