"""Downloads that appear whole and verified or not at all; archives of which only the expected files are unpacked."""

from __future__ import annotations

import gzip
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from engram import storage
from engram.errors import DataError
from engram.progress import SILENT, Progress

CHUNK = 1 << 20  # bytes read at once

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


class _Failure(Exception):
    """Why a download failed, in words that follow a colon."""


def cache_folder() -> Path:
    """Where downloads are kept unless the caller says otherwise: $ENGRAM_DATA, or `engram` in the user's cache."""
    if chosen := os.environ.get("ENGRAM_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "engram"


def check(path: Path, md5: str, remedy: str) -> None:
    """Refuse a file whose checksum is not `md5`."""
    try:
        found = storage.checksum(path, "md5")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {remedy}") from error
    if found != md5:
        raise DataError(f"{path} is damaged or another release: its MD5 is {found}, expected {md5}. {remedy}")


def fetch(url: str, target: Path, md5: str, progress: Progress = SILENT, timeout: float = 30.0) -> None:
    """Download `url` (http or https) to `target`, which appears whole and with this MD5, or not at all.

    `timeout` is how many seconds the server may stay silent.
    """
    try:
        with storage.writing(target) as aside:
            with _opened(url, timeout) as response:
                _receive(response, aside, progress)
            found = storage.checksum(aside, "md5")
            if found != md5:
                raise _Failure(f"the MD5 of what came is {found}, expected {md5}")
    except _Failure as failure:
        raise DataError(
            f"{url} could not be downloaded: {failure}. Try again later, "
            f"put the file at {target} by hand, or pass --data with a folder that holds the data."
        ) from failure
    except OSError as error:
        raise DataError(
            f"{url} could not be saved as {target}: {_reason(error)}. "
            "Make room there, or choose another folder with --data or ENGRAM_DATA."
        ) from error


@contextmanager
def _opened(url: str, timeout: float) -> Iterator[http.client.HTTPResponse]:
    if not url.lower().startswith(("http://", "https://")):
        raise _Failure("it is not an http or https address")
    opener = urllib.request.OpenerDirector()
    for handler in HANDLERS:
        opener.add_handler(handler())
    try:
        response = opener.open(urllib.request.Request(url, headers={"User-Agent": "engram"}), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        raise _Failure(f"the server answered {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise _Failure(f"it cannot be reached ({_reason(error.reason)})") from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no proper address
        raise _Failure(f"it cannot be reached ({_reason(error)})") from error
    with response:
        yield response


def _receive(response: http.client.HTTPResponse, path: Path, progress: Progress) -> None:
    announced = response.length
    received = 0
    with progress.phase("download", announced) as phase, path.open("wb") as file:
        for chunk in _chunks(response):
            file.write(chunk)
            received += len(chunk)
            phase.advance(len(chunk))
    if announced is not None and received != announced:
        raise _Failure(f"the connection ended after {received:,} of {announced:,} bytes")


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    # A generator, because it sees the network's errors and not those of the disk, which are OSErrors too.
    try:
        while chunk := response.read(CHUNK):
            yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise _Failure(f"the connection broke off ({_reason(error)})") from error


def _reason(error: str | BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def unpack(archive: Path, folder: Path, names: Collection[str]) -> None:
    """Make `folder`, at once, with the files `names` that a .tar.gz holds in a folder of that name, and no others.

    Members are looked up, never followed: links and paths that lead elsewhere have no effect. Verify the archive's
    checksum before: that of gzip comes after the last byte that a tar needs, and is not looked at.
    """

    def fill(aside: Path) -> None:
        wanted = {str(PurePosixPath(folder.name, name)): name for name in names}
        with tarfile.open(archive, "r:gz") as members:
            for member in members:
                content = members.extractfile(member) if member.isreg() and member.name in wanted else None
                if content is not None:
                    with content, (aside / wanted.pop(member.name)).open("wb") as file:
                        shutil.copyfileobj(content, file, CHUNK)
        if wanted:
            raise DataError(f"{archive} does not hold these as regular files: {', '.join(wanted)}. Download it again.")

    try:
        storage.publish_folder(folder, fill)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{archive} cannot be unpacked: {error}. Delete it and run again.") from error
    except OSError as error:
        raise DataError(
            f"{archive} could not be unpacked into {folder}: {_reason(error)}. "
            "Make room there, or choose another folder with --data or ENGRAM_DATA."
        ) from error


def provide(folder: Path, names: Collection[str], url: str, md5: str, progress: Progress = SILENT) -> None:
    """Make `folder` with the files `names` of the .tar.gz at `url`, or of the copy a person put beside the folder."""
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"The folder {root} cannot be made: {_reason(error)}. Choose another with --data or ENGRAM_DATA."
        ) from error
    archive = root / PurePosixPath(urlsplit(url).path).name
    with storage.locked(root):
        if folder.exists():
            return  # another process was faster
        if archive.exists():
            check(archive, md5, "Delete it and run again to download it.")
            unpack(archive, folder, names)
            return
        fetch(url, archive, md5, progress)
        try:
            unpack(archive, folder, names)
        finally:
            archive.unlink(missing_ok=True)
