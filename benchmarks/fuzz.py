"""Fuzz the four parsers that meet foreign bytes: manifest, tensors, form, image.

    pip install atheris
    python benchmarks/attacks.py fuzz                              (10^6 executions of each, an hour)
    python benchmarks/fuzz.py PARSER [--runs 100000] [--corpus DIR]    (one parser; what it found as JSON)

atheris has wheels for Linux alone, so no extra of engram installs it. It mutates valid files, which are made here, and
keeps what reaches new branches of the code (in benchmarks/work/fuzz, from one piece of the battery to the next).
Mutated bytes are rarely JSON, and never have the right checksum. So checksums are corrected after each mutation, as a
forger would, and an input that begins with `EDITS` is a list of edits of a valid JSON value instead of the bytes.

Only the project's own errors may come out of a parser. Anything else is counted as escaped, and its input is saved in
benchmarks/work/fuzz. A crash of native code, 25 seconds for one input or 4 GB end the process, and are bad as well.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import io
import json
import logging
import signal
import struct
import sys
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORK = HERE / "work" / "fuzz"
sys.path.append(str(HERE.parent / "tests"))
LIMITS = ("-timeout=25", "-rss_limit_mb=4096", "-max_len=2048", "-verbosity=0")
BRANCHES = ("engram.storage", "engram.model.manifest", "engram.server.uploads", "engram.data", "engram.text")
BRANCHES += ("PIL", "python_multipart", "starlette.formparsers")  # whose branches guide the mutations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parser", choices=PARSERS)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--corpus", type=Path, default=None)
    options = parser.parse_args()
    corpus = options.corpus or WORK / options.parser
    for folder in (corpus, WORK):
        folder.mkdir(parents=True, exist_ok=True)
    import atheris
    import torch

    torch.set_num_threads(1)
    with atheris.instrument_imports(include=list(BRANCHES)):
        seeds, execute = PARSERS[options.parser]()
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    counts: Counter[str] = Counter()
    begin, slowest = time.monotonic(), 0.0

    def one(content: bytes) -> None:
        nonlocal slowest
        start = time.process_time()
        try:
            counts["accepted" if execute(content) else "refused"] += 1
        except Exception as error:
            counts["escaped"] += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            name = f"{options.parser}-{type(error).__name__}-{Path(where.filename).stem}-{where.lineno}"
            if not (WORK / name).exists():
                (WORK / name).write_bytes(content)
                (WORK / f"{name}.txt").write_text(traceback.format_exc())
        slowest = max(slowest, time.process_time() - start)

    def report() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # libFuzzer's alarm, whose handler is gone: the end may take long
        seconds = {"slowest_seconds": round(slowest, 3), "fuzzing_seconds": round(time.monotonic() - begin, 1)}
        print(json.dumps({"executions": counts.total(), "escaped": 0, **counts, **seconds}))

    atexit.register(report)
    atheris.Setup(
        [sys.argv[0], *LIMITS, f"-artifact_prefix={WORK}/", f"-atheris_runs={options.runs}", str(corpus)], one
    )
    atheris.Fuzz()


EDITS = b"\x01"
ODD: tuple[Any, ...] = (None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308)
ODD += ("", "a", "0", "\0", "\u3164", [], {}, [[]], [0], {"": 0}, ["F32"], {"a": {"b": [1]}})


def edited(value: Any, choices: bytes) -> Any:
    """A JSON value with edits: for each, bytes choose the way to a place in it, and what is done there."""
    import atheris

    provider = atheris.FuzzedDataProvider(choices)
    holder = [json.loads(json.dumps(value))]
    while provider.remaining_bytes():
        place: Any = holder
        key: Any = 0
        while isinstance(place[key], dict | list) and place[key] and provider.ConsumeIntInRange(0, 5):
            place = place[key]
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = keys[provider.ConsumeIntInRange(0, len(keys) - 1)]
        match provider.ConsumeIntInRange(0, 5):
            case 0 if isinstance(place, dict):
                del place[key]
            case 1 if isinstance(place, dict):
                place[provider.ConsumeUnicode(8)] = deepcopy(place[key])
            case 2 if isinstance(place, list):
                place.append(deepcopy(place[key]))
            case 3:
                place[key] = provider.ConsumeUnicode(30)  # lone surrogates too
            case 4:
                place[key] = provider.ConsumeInt(9)
            case _:
                place[key] = deepcopy(ODD[provider.ConsumeIntInRange(0, len(ODD) - 1)])
    return holder[0]


Execute = Callable[[bytes], bool]  # whether the parser accepts the bytes; only errors of other kinds come out


def manifests() -> tuple[list[bytes], Execute]:
    """Manifest and pointer of a model, with a right checksum."""
    import hashlib
    from dataclasses import asdict

    from engram.errors import DataError
    from engram.model.manifest import DIGITS, OPENING, Change, File, Manifest, Pointer

    digest, now = "0123456789abcdef" * 4, "2026-01-31T12:00:00Z"
    manifest = Manifest(
        version=3,
        parent=1,
        created=now,
        action="learn",
        method="features",
        settings={"learning_rate": 0.1, "weights": None, "milestones": [1, 2], "cosine": True},
        classes=("façade", "Σ"),
        history=(Change(1, now, "learn", {"new": {"Σ": 3}}), Change(3, now, "learn", {"more": [1, 2], "classes": 2})),
        details={"size": [32, 32], "nested": {"threshold": 0.5}},
        learner=File(digest, 120),
        network=File(digest, 4000),
    )
    pointer = Pointer(current=3, versions={1: digest, 3: digest})

    def execute(content: bytes) -> bool:
        if content.startswith(EDITS):
            valid = (manifest, pointer)[content[1:2] > b"\x7f"]
            content = OPENING + b"0" * DIGITS + b'",' + json.dumps(edited(asdict(valid), content[2:]))[1:].encode()
        if content.startswith(OPENING):
            rest = content[len(OPENING) + DIGITS :]
            content = OPENING + hashlib.sha256(rest).hexdigest().encode() + rest
        accepted = False
        for kind in (Manifest, Pointer):
            try:
                parsed = kind.parse(content, "file")
            except DataError:
                continue
            accepted = True
            assert kind.parse(parsed.serialise(), "file") == parsed
        return accepted

    return [manifest.serialise(), pointer.serialise(), b"{}", EDITS, EDITS + b"\xff"], execute


def tensors() -> tuple[list[bytes], Execute]:
    """A safetensors file: its header as it is checked before anything is read, then all of it."""
    import torch

    from engram.errors import DataError
    from engram.storage import parse_tensors, read_shapes, serialise_tensors

    kinds = (torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool)
    seed = serialise_tensors({str(kind): torch.ones(2, 3).to(kind) for kind in kinds})
    length = int.from_bytes(seed[:8], "little")
    small = serialise_tensors({"a": torch.zeros(0, 4), "b": torch.tensor(1.0)})

    header, rest = json.loads(seed[8 : 8 + length]), seed[8 + length :]

    def execute(content: bytes) -> bool:
        if content.startswith(EDITS):
            text = json.dumps(edited(header, content[1:])).encode()
            content = len(text).to_bytes(8, "little") + text + rest
        with io.BufferedReader(io.BytesIO(content)) as file:
            try:
                shapes = read_shapes(file, len(content), "file")
            except DataError:
                shapes = None
        try:
            found = parse_tensors(content, "file")
        except DataError:
            return False
        if shapes is None:  # the library may accept what we do not
            return False
        for name, tensor in found.items():
            expected = (shapes[name].dtype, shapes[name].shape)
            assert (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) == expected
        return True

    return [seed, small, serialise_tensors({}), EDITS], execute


def forms() -> tuple[list[bytes], Execute]:
    """A form with images and classes, as `POST /api/teach` reads it."""
    from starlette.requests import Request

    from engram.server.config import Config
    from engram.server.problems import Problem
    from engram.server.uploads import read_form, read_upload

    def part(fields: str, content: bytes = b"x") -> bytes:
        return b"--b\r\nContent-Disposition: form-data; " + fields.encode() + b"\r\n\r\n" + content + b"\r\n"

    logging.disable()  # the parser logs what it refuses
    whole = part('name="files"; filename="a.png"') + part('name="classes"', "tülip".encode()) + b"--b--\r\n"
    encoded = part("name=\"files\"; filename*=utf-8''%e2%82%ac.png\r\nContent-Type: image/png") + b"--b--\r\n"
    many = part('name="files"; filename="a"') * 3 + part('name="classes"') * 3 + b"--b--\r\n"
    config, runner = Config(files=4), asyncio.Runner()
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/api/teach", "query_string": b""}
    scope["headers"] = [(b"content-type", b"multipart/form-data; boundary=b")]

    async def read(content: bytes) -> bool:
        half = len(content) // 2  # a boundary may be divided
        messages = [{"type": "http.request", "body": content[half:]}]
        messages += [{"type": "http.request", "body": content[:half], "more_body": True}]

        async def receive() -> Any:
            return messages.pop()

        try:
            async with read_form(Request(scope, receive), config) as form:
                (await read_upload(form, config)).close()
        except Problem as problem:
            assert 400 <= problem.status_code < 500
            return False
        return True

    return [whole, encoded, many, part('name="other"')], lambda content: runner.run(read(content))


def images() -> tuple[list[bytes], Execute]:
    """An image: its header, and its pixels if there are few."""
    from images_made import WITH_HEIC, encoded, gradient, heic

    from engram.data.images import UnreadableImage, decode, extent

    warnings.simplefilter("ignore")
    pixels = gradient(6, 9)
    seeds = [encoded(pixels, kind) for kind in ("JPEG", "PNG", "WebP", "BMP", "GIF")]
    seeds += [encoded(pixels, "WebP", lossless=True), encoded(pixels[:, :, 0], "PNG"), b"II*\0", b"<svg></svg>"]
    seeds += [encoded(pixels, "JPEG", progressive=True)]
    seeds += [heic(gradient(16, 16))] if WITH_HEIC else []

    def execute(content: bytes) -> bool:
        content = with_checksums(content)
        try:
            width, height = extent(content)
            if width * height <= 4096:
                assert decode(content, size=8).shape == (8, 8, 3)
        except UnreadableImage:
            return False
        return True

    return seeds, execute


def with_checksums(content: bytes) -> bytes:
    """A PNG whose chunks have the right checksums, as far as they are whole; anything else as it is."""
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return content
    parts, place = [content[:8]], 8
    while place + 12 <= len(content):
        (length,) = struct.unpack_from(">I", content, place)
        end = place + 8 + length
        if end + 4 > len(content):
            break
        parts += [content[place:end], struct.pack(">I", zlib.crc32(content[place + 4 : end]))]
        place = end + 4
    return b"".join([*parts, content[place:]])


PARSERS: dict[str, Callable[[], tuple[list[bytes], Execute]]]
PARSERS = {"manifest": manifests, "tensors": tensors, "form": forms, "image": images}

if __name__ == "__main__":
    main()
