"""Routes to take the model away: an archive with ONNX, labels and an example, and a summary as one HTML page."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from fastapi import APIRouter, Depends, Response
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse

from engram.errors import EngramError
from engram.model import ModelFolder, export, inspect, load
from engram.server.api import Server, Services, require_model
from engram.server.evidence import current_evidence
from engram.server.problems import Problem, as_problem, too_many
from engram.text import format_bytes

if TYPE_CHECKING:
    from jinja2 import Template

EXPORT_SECONDS = 600.0
RETRY_SECONDS = 10.0
EXAMPLE = Path(__file__).with_name("example.py.txt")
SUMMARY = Path(__file__).with_name("summary.html")

exports = APIRouter(prefix="/api", dependencies=[Depends(require_model)])
_exporting = threading.Lock()  # an export takes seconds of computation: one at a time


@exports.get("/export", response_class=FileResponse, responses={200: {"content": {"application/zip": {}}}})
async def export_archive(server: Server) -> FileResponse:
    """A ZIP archive of the version in use: model.onnx, labels.txt, summary.html, and example.py, which uses them."""
    aside, generation = await run_in_threadpool(_write_archive, server)
    name = f"{server.folder.path.name}-version-{generation}.zip"
    return FileResponse(
        Path(aside.name, "export.zip"),
        media_type="application/zip",
        filename=name,
        background=BackgroundTask(aside.cleanup),
    )


@exports.get("/summary", response_class=Response, responses={200: {"content": {"text/html": {}}}})
def export_summary(server: Server) -> Response:
    """What the model knows and how well, as one HTML page without outside resources."""
    name = quote(f"{server.folder.path.name}-summary.html", safe="")
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{name}"}
    return Response(_summary_page(server), media_type="text/html; charset=utf-8", headers=headers)


def _summary_page(server: Services) -> str:
    found = current_evidence(server)
    summary = inspect(server.folder)
    return _template().render(
        model=server.folder.path.name,
        summary=summary,
        evidence=found.evidence,
        bytes=format_bytes(summary.bytes.memory),
    )


@cache
def _template() -> Template:
    from jinja2 import Environment

    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(SUMMARY.read_text("utf-8"))


def _write_archive(server: Services) -> tuple[tempfile.TemporaryDirectory[str], int]:
    """A temporary folder with export.zip, and the version in it."""
    loaded = server.loader.current()
    summary = _summary_page(server)
    aside = tempfile.TemporaryDirectory(prefix="engram-export-")
    place = Path(aside.name)
    try:
        with _one_at_a_time():
            _export_in_process(server.folder, loaded.generation, place)
        with zipfile.ZipFile(place / "export.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(place / "model.onnx", "model.onnx", zipfile.ZIP_STORED)
            archive.writestr("labels.txt", "".join(f"{name}\n" for name in loaded.model.names))
            archive.writestr("example.py", EXAMPLE.read_text("utf-8").replace("SIZE", str(loaded.image_size)))
            archive.writestr("summary.html", summary)
    except BaseException:
        aside.cleanup()
        raise
    return aside, loaded.generation


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    if not _exporting.acquire(blocking=False):
        raise too_many("Another export is running. Try again when it has finished.", RETRY_SECONDS)
    try:
        yield
    finally:
        _exporting.release()


def _export_in_process(folder: ModelFolder, generation: int, place: Path) -> None:
    """Write `place`/model.onnx in a process of its own: predictions do not wait for it."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_export, args=(folder, generation, place), daemon=True)
    process.start()
    process.join(EXPORT_SECONDS)
    process.kill()
    process.join()
    problem = place / "problem.json"
    if problem.exists():
        raise Problem(**json.loads(problem.read_text("utf-8")))
    if not (place / "model.onnx").exists():
        raise EngramError("The export was killed, perhaps because memory ran out. The model is unchanged.")


def _export(folder: ModelFolder, generation: int, place: Path) -> None:
    try:
        export(load(folder, generation=generation, device="cpu"), place / "model.onnx", generation=generation)
    except Exception as error:
        problem = as_problem(error, folder.path)
        written = {"status_code": problem.status_code, "detail": problem.detail}
        (place / "problem.json").write_text(json.dumps(written), encoding="utf-8")
