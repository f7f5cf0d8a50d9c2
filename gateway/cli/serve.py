"""`loraplex serve`: one gateway, its registry and its workers, in one command."""

import logging
import os
from pathlib import Path
from typing import Any

import typer

from adapters import event_loop
from gateway.cli import engine_flags as flags
from gateway.cli.flags import JsonFlag
from gateway.cli.output import EXIT_FAILED, Output
from gateway.cli.reporter import Report, make_report
from gateway.cli.serve_options import (
    EngineOptions,
    ServeOptions,
    find_demo_adapters,
    parse_adapters,
    parse_memory,
    refuse_open_host,
    resolve_model,
)
from gateway.embedded.errors import EmbeddedError
from gateway.embedded.events import Failed, Settings
from gateway.embedded.own_packages import refuse_foreign_adapters
from gateway.embedded.state import default_state_dir

CLUSTER_TOKEN_VARIABLE = "LORAPLEX_CLUSTER_TOKEN"  # noqa: S105 - its name, not its value
SECRETS = {"api_key", "admin_key", "redis_url"}
CHOICES = {
    "dtype": ("auto", "bf16", "fp32"),
    "scheduling": ("fair", "fcfs"),
    "attention": ("auto", "triton", "flashinfer"),
}
# What an option left alone means, in words; the others show their value.
WHEN_UNSET = {
    "model": "the default base",
    "adapter": "none",
    "api_key": "none",
    "admin_key": "none",
    "max_model_len": "the checkpoint's",
    "num_threads": "all cores",
    "memory": "measured: min(4 GiB, half of what is available); on CUDA 0.90 of what is free",
    "redis_url": "a private Valkey",
    "served_model_name": "the checkpoint's own",
    "allowed_root": "none",
}


def serve(
    context: typer.Context,
    model: flags.ModelArgument = None,
    adapter: flags.AdapterFlag = None,
    host: flags.HostFlag = "127.0.0.1",
    port: flags.PortFlag = 8000,
    api_key: flags.ServerApiKeyFlag = None,
    admin_key: flags.ServerAdminKeyFlag = None,
    max_model_len: flags.MaxModelLenFlag = None,
    max_num_seqs: flags.MaxNumSeqsFlag = 64,
    max_tokens_per_step: flags.MaxTokensPerStepFlag = 512,
    memory: flags.MemoryFlag = None,
    block_size: flags.BlockSizeFlag = 16,
    num_threads: flags.NumThreadsFlag = None,
    scheduling: flags.SchedulingFlag = "fair",
    dtype: flags.DtypeFlag = "auto",
    device: flags.DeviceFlag = "cpu",
    attention: flags.AttentionFlag = "auto",
    workers: flags.WorkersFlag = 1,
    redis_url: flags.RedisUrlFlag = None,
    store: flags.StoreFlag = None,
    served_model_name: flags.ServedModelNameFlag = None,
    state_dir: flags.StateDirFlag = None,
    allowed_root: flags.AllowedRootFlag = None,
    json: JsonFlag = False,
) -> None:
    """Serve a base model and its adapters; with no arguments the default base and demo adapters."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    report = make_report(Output(as_json=json))
    parameters = {**context.params, "memory": parse_memory(memory)}
    try:
        refuse_foreign_adapters()
        options = _options(parameters)
        refuse_open_host(options)
        report(_settings(context, options))
        _run(options, report)
    except EmbeddedError as error:
        report(Failed(message=str(error)))
        raise typer.Exit(EXIT_FAILED) from error


def _run(options: ServeOptions, report: Report) -> None:
    # Imported late: the other commands need neither the gateway nor uvicorn.
    from gateway.cli.serving import run_serve

    event_loop.run(run_serve(options, report))


def engine_options(parameters: dict[str, Any]) -> EngineOptions:
    """The engine's options among a command's parameters; raises ServeRefused for no such model."""
    model, served_model_name = resolve_model(parameters["model"], parameters["served_model_name"])
    for name, known in CHOICES.items():
        if parameters[name] not in known:
            words = f"{', '.join(known[:-1])} or {known[-1]}"
            raise typer.BadParameter(f"--{name} must be {words}, not {parameters[name]!r}")
    return EngineOptions(
        model=model,
        served_model_name=served_model_name,
        dtype=parameters["dtype"],
        device=parameters["device"],
        attention=parameters["attention"],
        max_model_len=parameters["max_model_len"],
        max_num_seqs=parameters["max_num_seqs"],
        max_tokens_per_step=parameters["max_tokens_per_step"],
        block_size=parameters["block_size"],
        memory_bytes=parameters["memory"],
        num_threads=parameters["num_threads"],
        scheduling=parameters["scheduling"],
    )


def absolute(path: Path) -> Path:
    """The path as it is from anywhere, with ~ filled in."""
    return path.expanduser().absolute()


def _options(parameters: dict[str, Any]) -> ServeOptions:
    adapters = parse_adapters(parameters["adapter"] or [])
    if parameters["model"] is None and not adapters:
        adapters = find_demo_adapters()
    store = parameters["store"]
    return ServeOptions(
        engine=engine_options(parameters),
        adapters=adapters,
        host=parameters["host"],
        port=parameters["port"],
        api_key=parameters["api_key"] or None,
        admin_key=parameters["admin_key"] or None,
        cluster_token=os.environ.get(CLUSTER_TOKEN_VARIABLE) or None,
        num_workers=parameters["workers"],
        redis_url=parameters["redis_url"] or None,
        store_dir=None if store is None else absolute(store),
        state_dir=absolute(parameters["state_dir"] or default_state_dir()),
        allowed_roots=tuple(absolute(root) for root in parameters["allowed_root"] or []),
    )


def _settings(context: typer.Context, options: ServeOptions) -> Settings:
    values, sources = {}, {}
    shown = {**WHEN_UNSET, "state_dir": str(options.state_dir)}
    shown["store"] = str(options.state_dir / "store")
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in {"json", "help"}:
            continue
        value = context.params[name]
        source = context.get_parameter_source(name)
        flag = name.replace("_", "-")
        sources[flag] = {"COMMANDLINE": "option", "ENVIRONMENT": "environment"}.get(
            source.name if source is not None else "", "default"
        )
        values[flag] = _shown(name, value, unset=shown)
    if options.adapters and not context.params["adapter"]:
        values["adapter"] = "the demo ones: " + ", ".join(one.name for one in options.adapters)
    return Settings(values=values, sources=sources)


def _shown(name: str, value: Any, *, unset: dict[str, str]) -> str:
    if value is None or value in ([], ()):
        return unset.get(name, "none")
    if name in SECRETS:
        return "given"
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    return str(value)
