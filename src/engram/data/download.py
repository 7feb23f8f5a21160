"""Download a file completely and verified, or not at all; unpack only named files of an archive."""

from __future__ import annotations

import gzip
import http.client
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from engram import storage
from engram.errors import DataError
from engram.progress import SILENT, Progress

CHUNK = 1 << 20  # bytes read at once
SILENCE = 30.0  # seconds for which a server may send nothing

# Only these, so that no redirect leads to a local file or another protocol.
HANDLERS = (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.UnknownHandler,
)
ELSEWHERE = "Free some space, or choose another folder with --data or ENGRAM_DATA."


class _Failure(Exception):
    """Why a download failed."""


def fetch(url: str, target: Path, md5: str, progress: Progress = SILENT, timeout: float = SILENCE) -> None:
    """Download `url` (http or https) to `target`, which appears complete and with this MD5, or not at all."""
    try:
        with storage.writing(target) as aside:
            with _open(url, timeout) as response, aside.open("wb") as file:
                expected, received = response.length, 0
                with progress.phase("download", expected) as phase:
                    for chunk in _chunks(response):
                        received += file.write(chunk)
                        phase.advance(len(chunk))
            if expected is not None and received != expected:
                raise _Failure(f"the connection ended after {received:,} of {expected:,} bytes")
            if (found := storage.checksum(aside, "md5")) != md5:
                raise _Failure(f"the MD5 of the received file is {found}, expected {md5}")
    except _Failure as failure:
        raise DataError(
            f"{url} could not be downloaded: {failure}. Try again later, "
            f"put the file at {target} by hand, or pass --data with a folder that holds the data."
        ) from failure
    except OSError as error:
        raise DataError(f"{url} could not be saved as {target}: {_reason(error)}. {ELSEWHERE}") from error


def _open(url: str, timeout: float) -> http.client.HTTPResponse:
    if not url.lower().startswith(("http://", "https://")):
        raise _Failure("it is not an http or https address")
    opener = urllib.request.OpenerDirector()
    for handler in HANDLERS:
        opener.add_handler(handler())
    try:
        response: http.client.HTTPResponse = opener.open(
            urllib.request.Request(url, headers={"User-Agent": "engram"}), timeout=timeout
        )
    except urllib.error.HTTPError as error:
        error.close()
        raise _Failure(f"the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: not a valid address
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise _Failure(f"it cannot be reached ({_reason(reason)})") from error
    return response


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """A generator, so that errors of the network are not mistaken for those of the disk: both are OSErrors."""
    try:
        while chunk := response.read(CHUNK):
            yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise _Failure(f"the connection failed ({_reason(error)})") from error


def _reason(error: str | BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def unpack(archive: Path, folder: Path, names: Collection[str]) -> None:
    """Make `folder`, atomically, with the files `names` that a .tar.gz holds in a folder of that name, and no others.

    Members are looked up, never followed: links and paths that lead elsewhere have no effect. Verify the archive's
    checksum first: gzip's own comes after the last byte that tar reads, and is not checked.
    """
    wanted = {str(PurePosixPath(folder.name, name)): name for name in names}
    try:
        with storage.writing_folder(folder) as aside, tarfile.open(archive, "r:gz") as members:
            for member in members:
                content = members.extractfile(member) if member.isreg() and member.name in wanted else None
                if content is not None:
                    with content, (aside / wanted.pop(member.name)).open("wb") as file:
                        shutil.copyfileobj(content, file, CHUNK)
            if wanted:
                raise DataError(f"{archive} lacks these regular files: {', '.join(wanted)}. Download it again.")
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{archive} cannot be unpacked: {error}. Delete it and run again.") from error
    except OSError as error:
        raise DataError(f"{archive} could not be unpacked into {folder}: {_reason(error)}. {ELSEWHERE}") from error


def provide(folder: Path, names: Collection[str], url: str, md5: str, progress: Progress = SILENT) -> None:
    """Make `folder` with the files `names` of the .tar.gz at `url`, or of a copy of it beside the folder."""
    root = folder.parent
    storage.make_folder(root)
    archive = root / PurePosixPath(urlsplit(url).path).name
    with storage.locked(root):
        if folder.exists():
            return  # another process was faster
        if is_copy := archive.exists():
            if (found := storage.checksum(archive, "md5")) != md5:
                advice = "Delete it and run again to download it."
                raise DataError(f"{archive} is damaged: its MD5 is {found}, expected {md5}. {advice}")
        else:
            fetch(url, archive, md5, progress)
        try:
            unpack(archive, folder, names)
        finally:
            if not is_copy:
                archive.unlink(missing_ok=True)
