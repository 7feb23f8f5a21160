"""A download is complete and verified or leaves no file; only requested files of an archive are unpacked."""

from __future__ import annotations

import hashlib
import io
import resource
import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from progress_made import Recorder

from engram import storage
from engram.data import cifar, download
from engram.data.cifar import CIFAR100, Release
from engram.data.scanning import cache_folder
from engram.errors import DataError, EngramError

CONTENT = bytes(range(256)) * 20_000  # 5 MB: several chunks
MD5 = hashlib.md5(CONTENT).hexdigest()
FOLDER = CIFAR100.folder

Answer = Callable[[BaseHTTPRequestHandler], None]
Serve = Callable[[dict[str, Answer]], str]


def body(content: bytes, announced: int | None = None) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content) if announced is None else announced))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def redirect(target: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", target)
        handler.end_headers()

    return answer


def left(folder: Path) -> list[str]:
    """All files in a folder except the lock."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != ".lock")


def test_a_download_has_the_bytes_that_the_server_sent(serve: Serve, tmp_path: Path) -> None:
    download.fetch(serve({"/file": body(CONTENT)}) + "/file", tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert left(tmp_path) == ["file"]


def test_progress_counts_the_bytes(serve: Serve, tmp_path: Path) -> None:
    recorder = Recorder()
    download.fetch(serve({"/file": body(CONTENT)}) + "/file", tmp_path / "file", MD5, recorder)
    assert recorder.phases == [["download", len(CONTENT), len(CONTENT)]]


def test_a_body_of_unknown_length_is_downloaded(serve: Serve, tmp_path: Path) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(CONTENT)

    recorder = Recorder()
    download.fetch(serve({"/file": answer}) + "/file", tmp_path / "file", MD5, recorder)
    assert recorder.phases == [["download", None, len(CONTENT)]]
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_redirects_are_followed(serve: Serve, tmp_path: Path) -> None:
    address = serve({"/old": redirect("/new"), "/new": body(CONTENT)})
    download.fetch(address + "/old", tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def broken_chunks(handler: BaseHTTPRequestHandler) -> None:
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"ffff\r\nonly these")
    handler.close_connection = True


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda handler: handler.send_error(404), "404 Not Found"),
        (lambda handler: handler.send_error(503), "503 Service Unavailable"),
        (body(CONTENT[:1000], announced=len(CONTENT)), "1,000 of 5,120,000 bytes"),
        (body(b"", announced=10), "0 of 10 bytes"),
        (body(CONTENT[:1000]), f"[0-9a-f]{{32}}, .*{MD5}"),
        (broken_chunks, "the connection"),
        (lambda handler: None, "cannot be reached"),
        (redirect("file:///etc/hostname"), "302"),
        (redirect("ftp://127.0.0.1/file"), "unknown url type: ftp"),
    ],
)
def test_a_failed_download_is_explained_and_leaves_no_file(
    answer: Answer, message: str, serve: Serve, tmp_path: Path
) -> None:
    address = serve({"/file": answer}) + "/file"
    target = tmp_path / "file"
    with pytest.raises(DataError, match=rf"^{address} .*{message}.*{target} .*--data"):
        download.fetch(address, target, MD5)
    assert left(tmp_path) == []


def test_a_failed_download_does_not_change_an_earlier_file(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"earlier")
    with pytest.raises(DataError):
        download.fetch(serve({}) + "/file", tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == b"earlier"


def test_a_silent_server_times_out(serve: Serve, tmp_path: Path) -> None:
    release = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        body(b"some", announced=100)(handler)
        handler.wfile.flush()
        release.wait(10)

    try:
        with pytest.raises(DataError, match="timed out"):
            download.fetch(serve({"/file": answer}) + "/file", tmp_path / "file", MD5, timeout=0.1)
    finally:
        release.set()
    assert left(tmp_path) == []


def test_an_unreachable_server_is_named(serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^http://127\.0\.0\.1:1/file "):
        download.fetch("http://127.0.0.1:1/file", tmp_path / "file", MD5)
    assert left(tmp_path) == []


@pytest.mark.parametrize("scheme", ["file", "ftp", "data", ""])
def test_only_http_and_https_are_fetched(scheme: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(CONTENT)
    with pytest.raises(DataError, match="not an http or https address"):
        download.fetch(f"{scheme}://{tmp_path}/secret", tmp_path / "file", MD5)
    assert left(tmp_path) == ["secret"]


@pytest.mark.parametrize("address", ["http://", "http://bad host/", "http://[::1/"])
def test_an_invalid_address_is_a_data_error(address: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=tmp_path.name):
        download.fetch(address, tmp_path / "file", MD5)


def test_a_full_disk_is_distinguished_from_a_broken_network(serve: Serve, tmp_path: Path) -> None:
    address = serve({"/file": body(CONTENT)}) + "/file"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))
    try:
        with pytest.raises(DataError, match=rf"^{address} .*{tmp_path}/file: File too large"):
            download.fetch(address, tmp_path / "file", MD5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left(tmp_path) == []


def member(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), kind, link
    return info, content


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def test_only_the_requested_regular_files_are_unpacked(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    root.mkdir(parents=True)
    (root / "archive").write_bytes(
        archive_of(
            member(FOLDER, kind=tarfile.SYMTYPE, link=".."),
            member("../escaped", b"evil"),
            member(f"{tmp_path}/absolute", b"evil"),
            member(f"{FOLDER}/../../escaped", b"evil"),
            member(f"{FOLDER}/link", kind=tarfile.SYMTYPE, link="/etc/passwd"),
            member(f"{FOLDER}/train", kind=tarfile.SYMTYPE, link=f"{tmp_path}/through"),
            member(f"{FOLDER}/pipe", kind=tarfile.FIFOTYPE),
            member(f"{FOLDER}/train", b"good"),
            member(f"{FOLDER}/train", b"a second one"),
            member("train", b"outside"),
            member(f"{FOLDER}/unasked", b"evil"),
        )
    )
    download.unpack(root / "archive", root / FOLDER, ["train"])
    expected = ["deep", "deep/root", "deep/root/archive", f"deep/root/{FOLDER}", f"deep/root/{FOLDER}/train"]
    assert left(tmp_path) == expected
    assert (root / FOLDER / "train").read_bytes() == b"good"
    assert not (root / FOLDER / "train").is_symlink()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_a_link_in_place_of_a_file_is_refused(kind: bytes, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    archive = tmp_path / "archive"
    archive.write_bytes(
        archive_of(member(f"{FOLDER}/train", kind=kind, link="../secret"), member(f"{FOLDER}/test", b"x"))
    )
    with pytest.raises(DataError, match=f"{archive} lacks .* {FOLDER}/train"):
        download.unpack(archive, tmp_path / FOLDER, ["train", "test"])
    assert left(tmp_path) == ["archive", "secret"]


@pytest.mark.parametrize("damage", ["cut", "no archive", "empty"])
def test_a_damaged_archive_leaves_nothing(damage: str, tmp_path: Path) -> None:
    noise = b"".join(hashlib.sha256(bytes([i, j])).digest() for i in range(100) for j in range(100))
    complete = archive_of(member(f"{FOLDER}/train", noise))
    damaged = {"cut": complete[: len(complete) // 2], "no archive": b"<html>", "empty": b""}[damage]
    (tmp_path / "archive").write_bytes(damaged)
    with pytest.raises(DataError, match="archive "):
        download.unpack(tmp_path / "archive", tmp_path / FOLDER, ["train"])
    assert left(tmp_path) == ["archive"]


@pytest.fixture
def published(make_release: Callable[..., Release], tmp_path: Path, serve: Serve) -> Release:
    """A tiny release that is on a server and not on the disk."""
    release = make_release()
    folder = tmp_path / release.folder
    content = archive_of(*(member(f"{FOLDER}/{file.name}", file.read_bytes()) for file in folder.iterdir()))
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    address = serve({"/~kriz/tiny.tar.gz": body(content)})
    return replace(release, url=f"{address}/~kriz/tiny.tar.gz", md5=hashlib.md5(content).hexdigest())


FILES = [FOLDER, f"{FOLDER}/meta", f"{FOLDER}/test", f"{FOLDER}/train"]


def test_a_release_is_downloaded_once_into_a_new_folder(published: Release, tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    first = cifar.load(published, root)
    assert left(root) == FILES
    offline = replace(published, url="http://127.0.0.1:1/tiny.tar.gz")
    assert cifar.load(offline, root).train.fingerprint() == first.train.fingerprint()


def test_an_archive_beside_the_folder_is_used_and_kept(published: Release, tmp_path: Path) -> None:
    download.fetch(published.url, tmp_path / "tiny.tar.gz", published.md5)
    offline = replace(published, url="http://127.0.0.1:1/tiny.tar.gz")
    assert len(cifar.load(offline, tmp_path).train) == 5
    assert left(tmp_path) == [*FILES, "tiny.tar.gz"]


def test_an_archive_beside_the_folder_is_verified(published: Release, tmp_path: Path) -> None:
    (tmp_path / "tiny.tar.gz").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"tiny\.tar\.gz .*MD5"):
        cifar.load(published, tmp_path)
    assert left(tmp_path) == ["tiny.tar.gz"]


def test_a_release_whose_archive_lacks_a_file_leaves_nothing(published: Release, tmp_path: Path) -> None:
    needy = replace(published, checksums={**published.checksums, "more": "0" * 32})
    with pytest.raises(DataError, match=f"lacks .* {FOLDER}/more"):
        cifar.load(needy, tmp_path)
    assert left(tmp_path) == []


def test_the_next_download_removes_what_a_killed_one_left(published: Release, tmp_path: Path) -> None:
    (tmp_path / f"{storage.ASIDE}tiny.tar.gz-1234").write_bytes(b"half")
    half = tmp_path / f"{storage.ASIDE}{FOLDER}-1234"
    half.mkdir()
    (half / "train").write_bytes(b"half")
    cifar.load(published, tmp_path)
    assert left(tmp_path) == FILES


def test_two_processes_do_not_download_at_once(published: Release, tmp_path: Path) -> None:
    with storage.locked(tmp_path), pytest.raises(EngramError, match=str(tmp_path)):
        cifar.load(published, tmp_path)


def test_a_root_that_cannot_be_created_is_an_error(published: Release, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EngramError, match="file/root"):
        cifar.load(published, tmp_path / "file" / "root")


def test_environment_variables_set_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/person")
    monkeypatch.delenv("ENGRAM_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/person/.cache/engram")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/engram")
    monkeypatch.setenv("ENGRAM_DATA", "~/data")
    assert cache_folder() == Path("/home/person/data")
