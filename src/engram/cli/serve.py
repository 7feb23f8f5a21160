"""`engram serve`: an HTTP API and a page for a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from engram.cli.options import Device
from engram.errors import UsageError, not_installed
from engram.text import printable

TOKEN = "ENGRAM_TOKEN"
Host = Annotated[str, typer.Option(help="Address to listen at. Any but a loopback address needs a token.")]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="F", help=f"File with the token that clients must send. Or set {TOKEN}.")
]
WebhookAddresses = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS", help="Address or network of the webhook. Can be repeated. Default: as at the start."
    ),
]


def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder; the first update creates it.")],
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    token_file: TokenFile = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another host name of this server. Can be repeated.")
    ] = None,
    trusted_proxy: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A proxy whose X-Forwarded-* headers are trusted.")
    ] = None,
    max_upload: Annotated[str, typer.Option(metavar="BYTES", help="Size limit of a request.")] = "256MB",
    max_files: Annotated[int, typer.Option(min=1, help="Limit of images in a request.")] = 2_000,
    max_pixels: Annotated[int, typer.Option(min=1, help="Limit of pixels in an image.")] = 64_000_000,
    queue: Annotated[int, typer.Option(min=1, help="Limit of updates that wait.")] = 4,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of an update. Default: depends on the images.")
    ] = None,
    webhook: Annotated[
        str | None, typer.Option(metavar="URL", help="Send a JSON object there after every answer and update.")
    ] = None,
    webhook_allow: WebhookAddresses = None,
    device: Device = "auto",
) -> None:
    """Serve a model: an HTTP API and a page to classify images and to update and edit the model."""
    try:
        from engram.server import Config, make_server
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
        webhook=webhook,
        webhook_allow=tuple(webhook_allow or ()),
    )
    folder = ModelFolder(model)
    folder.check_place()
    typer.echo(f"serving {printable(model)} at http://{f'[{host}]' if ':' in host else host}:{port}/", err=True)
    make_server(folder, config).run()


def _token(file: Path | None) -> str | None:
    """The token from the file, or else from the environment."""
    if file is None:
        return os.environ.get(TOKEN, "").strip() or None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read a token from {printable(file)}. Name a text file that contains it.") from error
    if not token:
        raise UsageError(f"{printable(file)} is empty. Create a token with: openssl rand -hex 32")
    return token
