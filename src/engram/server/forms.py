"""Pictures that come with a request, as forms send them."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from engram.data.labelled import check_class_names
from engram.errors import DataError
from engram.server.config import Config
from engram.server.problems import Problem
from engram.server.uploads import Upload
from engram.text import LONGEST_NAME, composed, printable, unfit

LONGEST_FILE_NAME = 200  # letters of it that are repeated

FILES: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
CLASSES: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}}


def described(**fields: dict[str, Any]) -> dict[str, Any]:
    """A form with these fields, all of them needed, for the OpenAPI document."""
    schema = {"type": "object", "required": list(fields), "properties": fields}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


async def form_of(request: Request, config: Config) -> FormData:
    """The form, of no more files and fields than there may be."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise Problem(415, "Send the pictures as multipart/form-data, in fields named 'files'.")
    try:
        most = config.files + 1
        return await request.form(max_files=most, max_fields=most, max_part_size=4 * LONGEST_NAME)
    except (Problem, OSError):  # a full disk is not the form's fault
        raise
    except Exception as error:
        if "Too many" in str(getattr(error, "detail", "")):
            raise _too_many(config) from None
        raise Problem(400, "The form cannot be read. Send multipart/form-data as /openapi.json describes it.") from None


def files_of(form: FormData, config: Config) -> list[UploadFile]:
    """The files of a form."""
    files = [each for each in form.getlist("files") if isinstance(each, UploadFile)]
    if len(files) != len(form.getlist("files")) or not files:
        raise Problem(422, "Send at least one picture as a file, in fields named 'files'.")
    if len(files) > config.files:
        raise _too_many(config)
    for file in files:
        if (file.size or 0) > config.file_bytes:
            sentence = f"'{name_of(file)}' has more than {config.file_bytes:,} bytes. Make it smaller."
            raise Problem(413, sentence)
    return files


def classes_of(form: FormData, files: int) -> list[str]:
    """The class of each file."""
    classes = [each for each in form.getlist("classes") if isinstance(each, str)]
    if len(classes) != files or len(form.getlist("classes")) != files:
        raise Problem(
            422, f"There are {files} files and {len(classes)} classes. Send one 'classes' field for each file."
        )
    names = [composed(name) for name in classes]
    for problem in map(unfit, names):
        if problem is not None:
            raise Problem(422, problem)
    return names


async def upload_of(form: FormData, config: Config) -> Upload:
    """The pictures of a lesson, with their classes."""
    files = files_of(form, config)
    classes = classes_of(form, len(files))
    try:
        check_class_names(dict.fromkeys(classes, "sent"))
    except DataError as error:
        raise Problem(422, str(error)) from None
    upload = Upload()
    try:
        for file, kind in zip(files, classes, strict=True):
            await run_in_threadpool(upload.add, name_of(file), kind, await file.read())
    except BaseException:
        upload.close()
        raise
    return upload


def name_of(file: UploadFile) -> str:
    """The name that a file was sent with, fit to be shown."""
    return printable(file.filename or "")[:LONGEST_FILE_NAME]


def _too_many(config: Config) -> Problem:
    return Problem(413, f"A request may bring {config.files:,} files at most. Send fewer at a time.")
