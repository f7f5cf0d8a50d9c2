"""The options that several commands share."""

from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8000"

UrlFlag = Annotated[
    str, typer.Option("--url", envvar="LORAPLEX_URL", help="Address of the running server.")
]
KeyFlag = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=["LORAPLEX_API_KEY", "LORAPLEX_ADMIN_KEY"],
        show_envvar=True,
        help="Key for inference routes.",
    ),
]
AdminKeyFlag = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=["LORAPLEX_ADMIN_KEY", "LORAPLEX_API_KEY"],
        show_envvar=True,
        help="Key for admin routes.",
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
