"""The command line's entry: which commands there are."""

from importlib import metadata
from typing import Annotated

import typer

from gateway.cli import adapter
from gateway.cli.chat import chat
from gateway.cli.doctor import doctor
from gateway.cli.ps import ps
from gateway.cli.serve import serve
from gateway.cli.worker import worker

app = typer.Typer(
    name="loraplex",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="One base model, thousands of LoRA adapters, one OpenAI-compatible address.",
)
app.command("serve")(serve)
app.command("worker")(worker)
app.add_typer(adapter.app, name="adapter")
app.command("chat")(chat)
app.command("ps")(ps)
app.command("doctor")(doctor)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"loraplex {metadata.version('loraplex')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command that the shell gave."""
    app()
