"""The command line: serve, and everything a person does with a running server."""

from gateway.cli.app import main

__all__ = ["main"]
