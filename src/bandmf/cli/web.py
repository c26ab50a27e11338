"""`bandmf web`: a page to plan with, on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from bandmf.cli import show
from bandmf.web import server

EXAMPLE = "Example: bandmf web --port 8600 --no-browser"


def web(
    port: Annotated[
        int | None, typer.Option(help="Port on 127.0.0.1.", show_default="the first free one from 8501")
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
) -> None:
    server.serve(port, browser, lambda address: show.console.print(f"{address}  (Ctrl-C ends it)", highlight=False))
