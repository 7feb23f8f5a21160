"""Forms with images: their description, parsing and limits, and the file that holds the images of an update."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import IO, Any

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile

from engram.data.labelled import check_class_names
from engram.errors import DataError
from engram.server.config import Config
from engram.server.problems import Problem
from engram.text import composed, printable, unfit

LONGEST_FILE_NAME = 200  # characters in responses
LONGEST_NEW_NAME = 300  # characters of a class; models made on the command line may have longer ones
NAME_TOO_LONG = f"The name of a class may have {LONGEST_NEW_NAME} characters at most. Shorten it."
FILE = {"type": "string", "format": "binary"}
CLASS_NAME = {"type": "string", "minLength": 1, "maxLength": LONGEST_NEW_NAME}


def form_description(**fields: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI description of a form. FastAPI's own form parameters allow 1,000 files at most."""
    properties = {name: {"type": "array", "minItems": 1, "items": items} for name, items in fields.items()}
    schema = {"type": "object", "required": list(fields), "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


@asynccontextmanager
async def read_form(request: Request, config: Config) -> AsyncIterator[FormData]:
    """The form that a request sends; its files are deleted at the end."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise Problem(415, "Send the images as multipart/form-data, in fields named 'files'.")
    try:
        form = await request.form(max_files=config.files, max_fields=config.files, max_part_size=4 * LONGEST_NEW_NAME)
    except (Problem, OSError):  # a limit was exceeded, or the disk is full
        raise
    except Exception as error:
        if "Too many" in (reason := str(getattr(error, "detail", ""))):
            raise Problem(413, f"A request may have {config.files:,} files at most. Send fewer at a time.") from None
        if "exceeded maximum size" in reason:
            raise Problem(422, NAME_TOO_LONG) from None
        raise Problem(400, "The form is malformed. See /openapi.json.") from None
    try:
        yield form
    finally:
        await form.close()


def uploaded_files(form: FormData, config: Config) -> list[UploadFile]:
    """The images of a form."""
    files = [file for file in form.getlist("files") if isinstance(file, UploadFile)]
    if not files or len(files) != len(form.getlist("files")):
        raise Problem(422, "Send at least one image as a file, in fields named 'files'.")
    for file in files:
        if (file.size or 0) > config.file_bytes:
            raise Problem(413, f"'{file_name(file)}' has more than {config.file_bytes:,} bytes. Make it smaller.")
    return files


def labelled_files(form: FormData, config: Config) -> tuple[list[UploadFile], list[str]]:
    """The images of a form and their classes."""
    files = uploaded_files(form, config)
    classes = [composed(name) for name in form.getlist("classes") if isinstance(name, str)]
    if not len(files) == len(classes) == len(form.getlist("classes")):
        raise Problem(422, f"There are {len(files)} files and {len(classes)} classes. Send one class for each file.")
    return files, classes


def file_name(file: UploadFile) -> str:
    """The name of an uploaded file, for responses."""
    return printable(file.filename or "")[:LONGEST_FILE_NAME]


class Upload:
    """Uploaded files with names and classes, in one temporary file that has no name on Linux."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.classes: list[str] = []
        self.bytes = 0
        self._ends = [0]
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._digest = hashlib.sha256()

    def add(self, name: str, class_name: str, content: bytes) -> None:
        self._file.write(content)
        self._file.flush()  # so that a full disk is an error now, not when the job runs
        self.names.append(name)
        self.classes.append(class_name)
        self.bytes += len(content)
        self._ends.append(self.bytes)
        for part in (name.encode("utf-8", "replace"), class_name.encode("utf-8", "replace"), content):
            self._digest.update(len(part).to_bytes(8, "little") + part)

    def content(self, index: int) -> bytes:
        self._file.seek(self._ends[index])
        return self._file.read(self._ends[index + 1] - self._ends[index])

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


async def read_upload(form: FormData, config: Config) -> Upload:
    """The labelled images of a form, if their classes can be taught."""
    files, classes = labelled_files(form, config)
    for name in classes:
        if problem := unfit(name) or (NAME_TOO_LONG if len(name) > LONGEST_NEW_NAME else None):
            raise Problem(422, problem)
    try:
        check_class_names(dict.fromkeys(classes, "sent"))
    except DataError as error:
        raise Problem(422, str(error)) from None
    return await run_in_threadpool(_stored, files, classes)


def _stored(files: list[UploadFile], classes: list[str]) -> Upload:
    upload = Upload()
    try:
        for file, class_name in zip(files, classes, strict=True):
            upload.add(file_name(file), class_name, file.file.read())
    except BaseException:
        upload.close()
        raise
    return upload
