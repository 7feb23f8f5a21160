"""A server under attack: hostile requests, floods, bombs, full disks and kills.

The attacker has the address 127.0.0.1. What others notice is asked from 127.0.0.2, with the token. The server is
`engram serve` in processes of its own, whose memory and CPU time are read from /proc.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from images_made import WITH_HEIC, chunk, encoded, gradient, heic, png
from server_made import FLOOD

from battery.folders import Findings
from battery.kills import readable
from battery.servers import ATTACKER, NAMES, OTHER, TOKEN, Serving, image, multipart, small_model
from battery.step import Step
from engram.model import ModelFolder, verify
from engram.server import Config

PROMPT = 1.0  # seconds within which others are answered
SECONDS = 32.0  # of a flood
SHARE = Config().decode_share  # of a CPU: how fast the budget of a client recovers


def ask_others(server: Serving, seconds: float) -> tuple[list[float], int]:
    """Ask from another address, in turn whether the server lives and for its jobs; how long, and how often in vain."""
    times, failed, end = [], 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for path in ("/livez", "/api/jobs"):
            answer = server.request("GET", path)
            times.append(answer.seconds)
            failed += answer.status != 200
        time.sleep(0.05)
    return times, failed


def noticed(times: list[float], failed: int, quiet: list[float]) -> dict[str, Any]:
    """What others notice: they are to be answered within a second."""
    late = sum(each > PROMPT for each in times)
    return {
        "requests of others": len(times),
        "failed": failed,
        "late": late,
        "bad": failed + late,
        "slowest_seconds": round(max(times), 3),
        "median_seconds": round(float(np.median(times)), 4),
        "slowest_seconds_before": round(max(quiet), 3),
    }


def silent(count: int, place: Path) -> dict[str, Any]:
    """So many connections that send nothing, each opened again when it is closed."""
    with Serving(small_model(place), place) as server:
        quiet, _ = ask_others(server, 5)
        with subprocess.Popen([sys.executable, "-c", FLOOD, str(server.port), str(count)]) as flood:
            try:
                time.sleep(1)
                times, failed = ask_others(server, SECONDS)
                ended_early = flood.poll() is not None
            finally:
                flood.kill()
        found = {"connections": count, **noticed(times, failed, quiet), "server_mb": server.megabytes("VmHWM")}
        return {**found, "bad": found["bad"] + ended_early}


def health_checks(count: int, place: Path) -> dict[str, Any]:
    """Forty strangers who ask whether the server is ready, again and again, at the address of a user."""
    with Serving(small_model(place), place) as server:
        stop, statuses, asked = threading.Event(), Counter[int](), Counter[int]()

        def stranger() -> None:
            while not stop.is_set():
                asked[server.request("GET", "/readyz", address=ATTACKER, token="").status] += 1

        threads = [threading.Thread(target=stranger) for _ in range(40)]
        for thread in threads:
            thread.start()
        for number in range(count):
            address = (ATTACKER, OTHER)[number % 2]
            statuses[server.request("GET", "/api/model", address=address).status] += 1
        stop.set()
        for thread in threads:
            thread.join()
    refused = count - statuses[200]
    return {"requests": count, "refused": refused, "health checks": asked.total(), "bad": refused}


def long_names(count: int, place: Path) -> dict[str, Any]:
    """Requests to teach with 1,900 files of one byte, whose names are 9,990 emoji, or 900, as the parser allows."""
    with Serving(small_model(place), place) as server:
        server.classify(image())
        before = server.megabytes("VmRSS")
        bodies = [multipart([("🦊" * length, b"x")] * 1_900, ["a class"] * 1_900) for length in (9_990, 900)]
        statuses = Counter(
            server.request("POST", "/api/teach", *body, address=ATTACKER).status
            for body in bodies
            for _ in range(count)
        )
        while any(job["state"] in ("queued", "learning") for job in jobs(server)):
            time.sleep(0.5)
        after, listed = server.megabytes("VmRSS"), len(server.request("GET", "/api/jobs").body)
        return {
            "requests": 2 * count,
            "statuses": {str(status): number for status, number in statuses.items()},
            "memory_left_mb": round(after - before, 1),
            "jobs_mb": round(listed / 1e6, 2),
            "server_mb": server.megabytes("VmHWM"),
            "bad": int(after - before > 100) + int(listed > 2e6),
        }


def jobs(server: Serving) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(server.request("GET", "/api/jobs").body)["jobs"]
    return found


# Bombs


def webps(count: int, place: Path) -> dict[str, Any]:
    """A request with lossless WebPs of 2.4 KB and 62 million pixels, by a client that then leaves."""
    bomb = encoded(np.zeros((7_900, 7_900, 3), np.uint8), "WebP", lossless=True)
    body, kind = multipart([("a.webp", bomb)] * count)
    head = (
        f"POST /api/classify HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: {kind}\r\n"
    )
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with Serving(small_model(place), place) as server:
        quiet = [server.classify(image()).seconds for _ in range(20)]
        begin = server.cpu_seconds()
        answer = server.request("POST", "/api/classify", body, kind, address=ATTACKER)
        spent = server.cpu_seconds() - begin
        time.sleep(10 if spent < 5 else 45)  # until some of the budget has recovered
        attacker = socket.create_connection((ATTACKER, server.port))
        attacker.sendall(request)
        times = [server.classify(image()).seconds for _ in range(20)]
        attacker.close()
        time.sleep(2)  # the image in progress is finished
        begin = server.cpu_seconds()
        time.sleep(5)
        after = server.cpu_seconds() - begin
        slower = max(times) > max(PROMPT, 5 * max(quiet))
        return {
            "images": count,
            "status": str(answer.status),
            "request_seconds": round(answer.seconds, 1),
            "cpu_seconds": round(spent, 1),
            "cpu_seconds_after_leaving": round(after, 2),
            "bystander_slowest_seconds": round(max(times), 3),
            "bystander_slowest_seconds_before": round(max(quiet), 3),
            "server_mb": server.megabytes("VmHWM"),
            "bad": int(spent > 30 + SHARE * answer.seconds) + int(after > 1) + int(slower),
        }


def hostile_images(draws: random.Random) -> Iterator[bytes]:
    """Bombs, then valid images that were damaged, for ever."""
    yield png(60_000, 60_000, 8, 2, b"")
    yield png(64, 64, 8, 2, bytes(100 << 20))
    yield png(8, 8, 8, 2, bytes(8 * 25), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(50 << 20))))
    yield b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    yield b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) (r) file\nshowpage\n"
    yield b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    pixels = gradient(90, 120)
    valid = [encoded(pixels, kind) for kind in ("JPEG", "PNG", "WebP", "BMP", "GIF")]
    valid += [encoded(pixels, "JPEG", progressive=True), encoded(pixels, "WebP", lossless=True)]
    valid += [heic(pixels)] if WITH_HEIC else []
    while True:
        content = bytearray(draws.choice(valid))
        way = draws.randrange(3)
        if way == 0:
            del content[draws.randrange(len(content)) :]
        for _ in range(draws.randrange(1, 20)):
            at = draws.randrange(min(len(content), 60 if way == 1 else len(content)) or 1)
            content[at : at + 1] = bytes([draws.randrange(256)])
        yield bytes(content)


def photos(count: int, place: Path) -> dict[str, Any]:
    """Hostile and damaged images, 20 in a request; each gets an answer, and so does the good one beside them."""
    found, images = Findings(), hostile_images(random.Random(0))
    with Serving(small_model(place), place) as server:
        for _ in range(count // 20):
            answer = server.classify(*(next(images) for _ in range(19)), image())
            found["attempts"] += 20
            if answer.status != 200:
                found.bad(f"{answer.status}: {answer.body[:200]!r}")
                continue
            predictions = json.loads(answer.body)["predictions"]
            found["refused"] += sum("problem" in each for each in predictions)
            if len(predictions) != 20 or "top" not in predictions[-1]:
                found.bad("the good image was not classified")
        metrics = server.request("GET", "/metrics").body.decode()
        deaths = int(float(re.search(r"^engram_decoder_restarts_total (\S+)", metrics, re.M)[1]))  # type: ignore[index]
        found["decoders that died"] = deaths
        found["bad"] += deaths
        return {**found.output(), "server_mb": server.megabytes("VmHWM")}


# Protocol

METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "BREW", "get", "\x00", "G" * 5000)
PATHS = (
    *("/", "/livez", "/readyz", "/metrics", "/api/model", "/api/classify", "/api/teach", "/api/jobs", "/api/jobs/x"),
    *("/api/forget", "/api/rename", "/api/merge", "/api/rollback", "/api/jobs?limit=-1", "/api/jobs?limit=9e9"),
    *("/static/../../etc/passwd", "/static/%2e%2e/x", "//etc/passwd", "\\..\\x", "/%00", "/api/jobs?before=%00"),
    *("/api/classify?top=1e9", "/api/classify?reject=nan", "/" + "a" * 70_000, "http://other/", "*", "/api/model#a b"),
)
FORM = "Content-Type: multipart/form-data"
BOTH = "Content-Length: 4\r\nTransfer-Encoding: chunked"
HEADERS = (
    *("", BOTH, BOTH, "Content-Length: -1", "Content-Length: 5\r\nContent-Length: 6", f"Content-Length: {'9' * 30}"),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip", "Range: bytes=9-", "Expect: 100-continue"),
    *("Host: evil.example", "Host: a\r\nHost: b", "Host:", "Host: [::1", "Origin: http://evil.example", "Bad header"),
    *(FORM, f"{FORM}; boundary=", f"{FORM}; boundary=b\r\nContent-Length: 4", "X: " + "y" * 70_000, "A: 1\r\n" * 3000),
    *("Content-Type: application/json\r\nContent-Length: 4", "Upgrade: websocket\r\nConnection: Upgrade"),
    *("Cookie: session=\x80\xff", "Authorization: Bearer \xff", "Authorization: Basic Og=="),
    "Idempotency-Key: " + "k" * 5000,
)
BODIES = (
    *(b"", b"{}", b"[]", b"null", b"\xff\xfe\x00", b'{"classes":', b"--b\r\n\r\n\r\n", b"[" * 100_000, b"0\r\n\r\n"),
    *(b"zz\r\n", b'{"classes":["\\ud800"]}', b'{"from":"a","to":"\\u3164"}', b'{"to":1e400}', b'{"more":1}'),
)


def hostile_request(draws: random.Random) -> bytes:
    method, path, header = draws.choice(METHODS), draws.choice(PATHS), draws.choice(HEADERS)
    lines = [f"{method} {path} HTTP/{draws.choice(('1.1', '1.1', '1.1', '1.0', '2.0', 'x'))}"]
    lines += [] if "Host" in header else ["Host: localhost"]
    lines += [header] if header else []
    lines += [f"Authorization: Bearer {TOKEN}"] if draws.random() < 0.6 and "Authorization" not in header else []
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + draws.choice(BODIES)


def exchange(port: int, request: bytes) -> bytes:
    """Whatever the server answers until it closes the connection or says no more."""
    response = b""
    with socket.create_connection((ATTACKER, port), timeout=3) as connection, suppress(OSError):
        with suppress(OSError):  # it may be closed before all is sent
            connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        while received := connection.recv(65536):
            response += received
    return response


def protocol(count: int, place: Path) -> dict[str, Any]:
    """Hostile requests: refused, with the security headers, without a traceback or a path, and without any effect."""
    found, draws, statuses = Findings(), random.Random(0), Counter[str]()
    folder = small_model(place)
    with Serving(folder, place) as server:
        for _ in range(count):
            request = hostile_request(draws)
            response = exchange(server.port, request)
            found["attempts"] += 1
            status = response[9:12].decode("latin-1") if response.startswith(b"HTTP/1.1 ") else "none"
            statuses[status if status == "none" else f"{status[0]}xx"] += 1
            heads = response.count(b"HTTP/1.1 ")
            if status.startswith("5") or b"Traceback" in response or str(place).encode() in response:
                found.bad(f"{request[:200]!r}: {response[:300]!r}")
            elif heads and response.count(b"nosniff") < heads - response.count(b"HTTP/1.1 100"):
                found.bad(f"{request[:200]!r}: security headers are missing")
            both = BOTH.encode() in request
            if both and heads > 1:
                found.bad(f"{request[:200]!r}: the connection was not closed")
        if server.request("GET", "/readyz").status != 200 or not verify(folder).intact:
            found.bad("the server or its model was damaged")
        log = server.log.read_text()
        found["tracebacks in the log"] = log.count("Traceback")
        if "Traceback" in log:
            found.bad(log[log.index("Traceback") :].partition("\nWARNING")[0][-2000:])
        return {**found.output(), "statuses": dict(sorted(statuses.items())), "server_mb": server.megabytes("VmHWM")}


# Full disks


@contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own; needs root."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path) -> Path:
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1024))
    return disk / "filler"


def full_disk(count: int, place: Path) -> dict[str, Any]:
    """Uploads, edits and updates while the disk of the model and of temporary files is full."""
    found = Findings()
    names = {"a" * 10 + str(number) for number in range(count)}
    with small_disk(place / "disk", 48) as disk:
        folder = small_model(disk)
        large = [("a.png", encoded(np.random.default_rng(0).integers(0, 256, (900, 900, 3), dtype=np.uint8), "PNG"))]
        with Serving(folder, disk) as server:
            server.request("POST", "/api/classify", *multipart(large))  # where temporary files go is decided now
            filler = fill(disk)
            version = folder.current().version
            for name in names:
                sent = json.dumps({"from": NAMES[0], "to": name}).encode()
                for path, body, kind in (
                    ("classify", *multipart(large)),
                    ("teach", *multipart(large, ["a"])),
                    ("rename", sent, "application/json"),
                ):
                    answer = server.request("POST", f"/api/{path}", body, kind)
                    found["attempts"] += 1
                    if answer.status != 507 or answer.headers["x-content-type-options"] != "nosniff":
                        found.bad(f"{path}: {answer.status} {answer.body[:200]!r}")
            if server.classify(image()).status != 200:
                found.bad("no answer while the disk is full")
            filler.unlink()
            if not verify(folder).intact or folder.current().version != version:
                found.bad("the model was changed")
            if server.request("POST", "/api/rename", sent, "application/json").status != 200:
                found.bad("no edit when there is room again")
            return {**found.output(), "server_mb": server.megabytes("VmHWM")}


# Kills


def updater(server: Serving, others: set[int]) -> int | None:
    """The process that updates the model, as soon as it is there."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if new := set(server.family()) - others:
            return new.pop()
    return None


def finish_update(server: Serving) -> None:
    while jobs(server)[-1]["state"] in ("queued", "learning"):
        time.sleep(0.05)


def killed_updates(count: int, place: Path) -> dict[str, Any]:
    """SIGKILL of the process that updates the model, at random times."""
    folder, draws, found = small_model(place), random.Random(0), Findings()
    with Serving(folder, place, "--epochs", "1") as server:
        for _ in range(2):  # the first starts the other processes
            begin = time.monotonic()
            server.teach(NAMES[0])
            finish_update(server)
            usual = time.monotonic() - begin
        for number in range(count):
            before, others, begin = folder.current().version, set(server.family()), time.monotonic()
            server.teach(NAMES[number % 3])
            process = updater(server, others)
            time.sleep(draws.uniform(0, 1.2 * usual))
            if process is not None:
                with suppress(ProcessLookupError):  # it was quicker
                    os.kill(process, signal.SIGKILL)
                    found["kills"] += 1
            finish_update(server)
            check_killed(found, folder, before)
            state = jobs(server)[-1]["state"]
            usual = time.monotonic() - begin if state == "done" else usual
            found[f"the job is {state}"] += 1
        server.teach(NAMES[0])
        finish_update(server)
    return last_check(found, folder, server)


def killed_servers(count: int, place: Path) -> dict[str, Any]:
    """SIGKILL of the server during an update, at random times; its other processes end by themselves."""
    folder, draws, found = small_model(place), random.Random(0), Findings()
    for number in range(count):
        server = Serving(folder, place, "--epochs", "1").__enter__()
        before = folder.current().version
        server.teach(NAMES[number % 3])
        time.sleep(draws.uniform(0, 4))
        family = server.family()
        server.process.kill()
        server.process.wait()
        found["kills"] += 1
        end = time.monotonic() + 60
        while (left := server.family()) and time.monotonic() < end:
            time.sleep(0.05)
        if left:
            found.bad(f"{len(left)} of {len(family)} processes are left")
        check_killed(found, folder, before)
    with Serving(folder, place, "--epochs", "1") as server:
        server.teach(NAMES[0])
        finish_update(server)
    return last_check(found, folder, server)


def check_killed(found: Findings, folder: ModelFolder, before: int) -> None:
    found["attempts"] += 1
    found["new" if folder.current().version > before else "old"] += 1
    found["left something"] += bool(folder.leftovers())
    for problem in readable(folder):
        found.bad(problem)


def last_check(found: Findings, folder: ModelFolder, server: Serving) -> dict[str, Any]:
    """After an update that was not killed."""
    if left := folder.leftovers():
        found.bad(f"the last update left {left}")
    files = [path for path in server.temporary.rglob("*") if path.is_file()]
    for path in files:
        found.bad(f"{path.name} is left among the temporary files")
    found["empty folders of multiprocessing"] = len(list(server.temporary.iterdir())) - len(files)
    return found.output()


SILENT = f"others are answered within {PROMPT:.0f} s"
FLOODS = {
    "600 silent connections": Step(
        lambda count, place: silent(600, place), 1, SILENT, "2 of 281 requests and 2 of 281 /livez answered in 32 s"
    ),
    "2,000 silent connections": Step(lambda count, place: silent(2000, place), 1, SILENT),
    "40 strangers at /readyz": Step(health_checks, 231, "no authenticated request gets 429", "204 of 231"),
    "names of 9,990 emoji": Step(
        long_names,
        5,
        "less than 100 MB stay, and a page of jobs has less than 2 MB",
        "155 MB stayed after one request; after five, /api/jobs had 379 MB",
    ),
}
BOMBS = {
    "60 WebPs of 62 million pixels": Step(
        webps,
        60,
        "30 CPU seconds and a quarter of the time at most; others wait as before; it ends when the client leaves",
        "60 CPU seconds; others waited 3 to 6 s instead of 0.01; work went on",
    ),
    "640 hostile and damaged images": Step(
        photos, 640, "every request is answered, no decoder dies", "no decoder died"
    ),
}
PROTOCOL = {
    "hostile requests": Step(
        protocol,
        479,
        "no 5xx, no traceback, no path, security headers in every answer, closed after two lengths",
        "no 5xx; two lengths did not close the connection",
    )
}
DISK = {
    "of a server": Step(
        full_disk, 20, "507 with the security headers; the model stays", "500 for rename, 507 without these headers"
    )
}
KILLS = {
    "a server's update": Step(killed_updates, 30, "the old model or the new one"),
    "a server": Step(killed_servers, 10, "the old model or the new one; no process stays"),
}
