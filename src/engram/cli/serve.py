"""`engram serve`: a model that people ask and teach over HTTP, and its page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from engram.cli.options import Device
from engram.errors import UsageError, not_installed
from engram.text import printable

TOKEN = "ENGRAM_TOKEN"


def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder; made by the first lesson.")],
    host: Annotated[str, typer.Option(help="The address to listen at. Any but this machine's own needs a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen at.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(metavar="F", help=f"A file with the token that is asked for. Or set {TOKEN}.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another name that the server may be called by.")
    ] = None,
    trusted_proxy: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="A proxy whose word on who asks, and whether by https, is taken."),
    ] = None,
    max_upload: Annotated[str, typer.Option(metavar="BYTES", help="What one request may bring.")] = "256MB",
    max_files: Annotated[int, typer.Option(min=1, help="Pictures in one request.")] = 2_000,
    max_pixels: Annotated[int, typer.Option(min=1, help="Of one picture.")] = 64_000_000,
    queue: Annotated[int, typer.Option(min=1, help="Lessons that may wait.")] = 4,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="How often pictures are gone through. Default: by them.")
    ] = (None),
    device: Device = "auto",
) -> None:
    """Serve a model: a page and an HTTP interface to ask it, teach it and change it. Ctrl-C ends it."""
    try:
        from engram.server import Config, check_address, make_server
    except ModuleNotFoundError as error:
        raise not_installed(f"To serve, {error.name}", "serve") from error
    from engram.methods import parse_bytes
    from engram.model import ModelFolder

    config = Config(
        host=host,
        port=port,
        hosts=tuple(allow_host or ()),
        token=_token(token_file),
        trusted_proxy=trusted_proxy,
        device=device,
        epochs=epochs,
        body_bytes=parse_bytes(max_upload),
        files=max_files,
        pixels=max_pixels,
        queue=queue,
    )
    folder = ModelFolder(model)
    folder.check_place()
    check_address(host, port)
    typer.echo(f"serving {printable(model)} at http://{f'[{host}]' if ':' in host else host}:{port}/", err=True)
    make_server(folder, config).run()


def _token(file: Path | None) -> str | None:
    """What the file holds, or else the environment; blanks around it do not count."""
    if file is None:
        return os.environ.get(TOKEN, "").strip() or None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The token cannot be read from {printable(file)}. Name a text file that holds it.") from error
    if not token:
        raise UsageError(f"{printable(file)} is empty. Put a token into it, such as: openssl rand -hex 32")
    return token
