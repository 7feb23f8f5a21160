"""Routes about a whole version: evidence from its stored features, a summary page, and an archive with ONNX."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import threading
import zipfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from urllib.parse import quote

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, Field
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse

from engram.errors import EngramError
from engram.model import Evidence, ModelFolder, RejectionThreshold, export, inspect, load
from engram.server.problems import too_many
from engram.server.services import Server, Services, require_model
from engram.text import format_bytes

RATES = (0.01, 0.02, 0.05, 0.1, 0.2)  # of accepted images of unknown classes
EXPORT_SECONDS = 600
RETRY_SECONDS = 10.0
EXAMPLE = Path(__file__).with_name("example.py.txt")
SUMMARY = Path(__file__).with_name("summary.html")

measures = APIRouter(prefix="/api", dependencies=[Depends(require_model)])
_computing = threading.Lock()  # one computation at a time
_exporting = threading.Lock()  # an export takes seconds of computation: others are refused


class VersionEvidence(BaseModel):
    """The evidence about one version."""

    version: int
    evidence: Evidence
    rejections: list[RejectionThreshold] = Field(description="What `reject` does at some rates, if that is known.")


@measures.get("/evidence")
def get_evidence(server: Server) -> VersionEvidence:
    """How well each class is recognised, what it is confused with, and whether more images would help."""
    loaded = server.loader.current()
    with _computing:
        found = loaded.evidence
        similarity = loaded.model.class_similarity
    rejections = [] if similarity is None else [similarity.threshold(rate) for rate in RATES]
    return VersionEvidence(version=loaded.version, evidence=found, rejections=rejections)


@measures.get("/summary", response_class=Response, responses={200: {"content": {"text/html": {}}}})
def get_summary(server: Server) -> Response:
    """What the model knows and how well, as one HTML page without outside resources."""
    name = quote(f"{server.folder.path.name}-summary.html", safe="")
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{name}"}
    return Response(_summary_page(server), media_type="text/html; charset=utf-8", headers=headers)


def _summary_page(server: Services) -> str:
    from jinja2 import Environment

    summary = inspect(server.folder)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(SUMMARY.read_text("utf-8")).render(
        model=server.folder.path.name,
        summary=summary,
        evidence=get_evidence(server).evidence,
        bytes=format_bytes(summary.bytes.memory),
    )


@measures.get("/export", response_class=FileResponse, responses={200: {"content": {"application/zip": {}}}})
async def get_export(server: Server) -> FileResponse:
    """A ZIP archive of the version in use: model.onnx, labels.txt, summary.html, and example.py, which uses them."""
    aside, version = await run_in_threadpool(_write_archive, server)
    name = f"{server.folder.path.name}-version-{version}.zip"
    return FileResponse(
        Path(aside.name, "export.zip"),
        media_type="application/zip",
        filename=name,
        background=BackgroundTask(aside.cleanup),
    )


def _write_archive(server: Services) -> tuple[tempfile.TemporaryDirectory[str], int]:
    """A temporary folder with export.zip, and the version in it."""
    loaded = server.loader.current()
    summary = _summary_page(server)
    aside = tempfile.TemporaryDirectory(prefix="engram-export-")
    place = Path(aside.name)
    try:
        _export_in_process(server.folder, loaded.version, place / "model.onnx")
        with zipfile.ZipFile(place / "export.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(place / "model.onnx", "model.onnx", zipfile.ZIP_STORED)
            archive.writestr("labels.txt", "".join(f"{name}\n" for name in loaded.model.names))
            archive.writestr("example.py", EXAMPLE.read_text("utf-8").replace("SIZE", str(loaded.image_size)))
            archive.writestr("summary.html", summary)
    except BaseException:
        aside.cleanup()
        raise
    return aside, loaded.version


def _export_in_process(folder: ModelFolder, version: int, path: Path) -> None:
    """Export in a process of its own: predictions do not wait for it."""
    if not _exporting.acquire(blocking=False):
        raise too_many("Another export is running. Try again when it has finished.", RETRY_SECONDS)
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
            pool.submit(_export, folder, version, path).result()
    except BrokenProcessPool:
        raise EngramError("The export was killed, perhaps because memory ran out. The model is unchanged.") from None
    finally:
        _exporting.release()


def _export(folder: ModelFolder, version: int, path: Path) -> None:
    signal.alarm(EXPORT_SECONDS)  # ends this process
    export(load(folder, version=version, device="cpu"), path, version=version)
