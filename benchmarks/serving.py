"""A model on the network under load and under attack: the default network, asked by other processes.

    python benchmarks/serving.py [part ...]      throughput, single, camera, updating, swaps, attack; all without a name

Each part starts `engram serve` as people do, measures ratios side by side in one run, and adds what it found to
benchmarks/results/serving.json.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch
from PIL import Image

from engram.data import Samples
from engram.data.labelled import LabelledImages
from engram.model import LearnOptions, ModelFolder, learn_images, load, rename

HERE = Path(__file__).parent
RESULT = HERE / "results" / "serving.json"
SIDE = 224
CAMERA = 256  # the side of the page's camera images
CLASSES = tuple(f"class {number}" for number in range(10))


def drawn(seed: int, side: int = SIDE) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An image that costs as much to decode as a photo: smooth, with some noise."""
    numbers = np.random.default_rng(seed)
    coarse = Image.fromarray(numbers.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((side, side), 3)
    return np.clip(np.asarray(coarse).astype(int) + numbers.integers(-12, 13, (side, side, 3)), 0, 255).astype(np.uint8)


def jpeg(seed: int, side: int = SIDE) -> bytes:
    file = io.BytesIO()
    Image.fromarray(drawn(seed, side)).save(file, "JPEG", quality=90)
    return file.getvalue()


def make_model(place: Path) -> ModelFolder:
    """A model of ten classes on the default network; its accuracy does not matter here."""
    folder = ModelFolder(place)
    images = torch.from_numpy(np.stack([drawn(seed) for seed in range(60)]))
    samples = Samples.of(images, torch.arange(60) % len(CLASSES))
    learn_images(folder, LabelledImages(samples, CLASSES, (), ()), LearnOptions(image_size=SIDE))
    return folder


class Server:
    """`engram serve`, with all its processes."""

    def __init__(self, folder: ModelFolder, *arguments: object) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "engram", "serve", folder.path, "--port", self.port, *arguments]
        self.process = subprocess.Popen([str(each) for each in command], stderr=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{self.port}"
        while True:
            with suppress(httpx2.TransportError):
                if httpx2.get(f"{self.url}/livez").status_code == 200:
                    break
            assert self.process.poll() is None
            time.sleep(0.1)

    def bytes(self) -> int:
        """What the server and all that it started take of memory, each shared page counted by its share."""
        return sum(_proportional(pid) for pid in [self.process.pid, *_children(self.process.pid)])

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *_children(child)]
    return found


def _proportional(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


@contextmanager
def served(folder: ModelFolder, *arguments: object) -> Iterator[Server]:
    server = Server(folder, *arguments)
    try:
        yield server
    finally:
        server.end()


def form(*contents: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    return [("files", (f"{number}.jpg", content)) for number, content in enumerate(contents)]


def ask(url: str, contents: list[list[bytes]], seconds: float, clients: int) -> list[float]:
    """Ask for so long, from so many threads of this process; how long each request took."""
    took: list[float] = []
    end = time.perf_counter() + seconds

    def go(number: int) -> None:
        with httpx2.Client(base_url=url, timeout=120) as client:
            turn = number
            while time.perf_counter() < end:
                begin = time.perf_counter()
                said = client.post("/api/classify", files=form(*contents[turn % len(contents)]))
                took.append(time.perf_counter() - begin)
                assert said.status_code == 200, said.text
                assert all("top" in each for each in said.json()["predictions"])
                turn += 1

    threads = [threading.Thread(target=go, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


def bare(folder: ModelFolder, seconds: float) -> float:
    """Images a second of the forward pass alone, 32 at a time."""
    model = load(folder, device="cpu")
    images = torch.from_numpy(np.stack([drawn(seed) for seed in range(32)]))
    model.probabilities(images)
    begin, done = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        model.probabilities(images)
        done += 32
    return done / (time.perf_counter() - begin)


def in_another(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a process of its own, which does not share this one's interpreter."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def throughput(folder: ModelFolder, seconds: float = 8, rounds: int = 3) -> dict[str, object]:
    """32 images a request, against the bare forward pass, in turn."""
    contents = [[jpeg(32 * turn + number) for number in range(32)] for turn in range(4)]
    alone, asked = [], []
    for _ in range(rounds):
        alone.append(in_another(bare, folder, seconds))
        with served(folder) as server:
            in_another(ask, server.url, contents, 2, 2)
            took = in_another(ask, server.url, contents, seconds, 3)
            asked.append(32 * len(took) / seconds)
    ratios = [one / other for one, other in zip(asked, alone, strict=True)]
    return {
        "bare_images_per_second": [round(each, 1) for each in alone],
        "served_images_per_second": [round(each, 1) for each in asked],
        "ratio": round(statistics.median(ratios), 3),
    }


def single(folder: ModelFolder, seconds: float = 8) -> dict[str, object]:
    """Many clients with one image each: answered together, and for comparison one client alone."""
    contents = [[jpeg(number)] for number in range(64)]
    with served(folder) as server:
        in_another(ask, server.url, contents, 2, 4)
        one = in_another(ask, server.url, contents, seconds, 1)
        before = _batches(server.url)
        many = in_another(ask, server.url, contents, seconds, 24)
        after = _batches(server.url)
    images, passes = after[0] - before[0], after[1] - before[1]
    return {
        "one_client_per_second": round(len(one) / seconds, 1),
        "twenty_four_clients_per_second": round(len(many) / seconds, 1),
        "ratio": round(len(many) / len(one), 2),
        "images_in_a_pass": round(images / passes, 2),
    }


def _batches(url: str) -> tuple[float, float]:
    lines = dict(line.rsplit(" ", 1) for line in httpx2.get(f"{url}/metrics").text.splitlines() if line[0] != "#")
    return float(lines["engram_batch_images_sum"]), float(lines["engram_batch_images_count"])


def film(url: str, contents: list[bytes], seconds: float) -> list[tuple[float, float, int]]:
    """Ask as the page's camera does, at most ten times per second, until another version answers.

    When each request began, how long it took, and the version that answered.
    """
    asked: list[tuple[float, float, int]] = []
    with httpx2.Client(base_url=url, timeout=120) as client:
        end, number = time.monotonic() + seconds, 0
        while (begin := time.monotonic()) < end and (not asked or asked[0][2] == asked[-1][2]):
            response = client.post("/api/classify?top=20", files=form(contents[number % len(contents)]))
            took, number = time.monotonic() - begin, number + 1
            asked.append((begin, took, response.raise_for_status().json()["version"]))
            time.sleep(max(0.0, 0.1 - took))
    return asked


def updating(folder: ModelFolder, rounds: int = 3, seconds: float = 15) -> dict[str, object]:
    """60 images of two new classes, with `engram learn` and over HTTP in turn, while a camera is classified."""
    contents = [jpeg(number, CAMERA) for number in range(64)]
    names = [f"new {number % 2}" for number in range(60)]
    images = [jpeg(1_000 + number, CAMERA) for number in range(60)]
    learned, in_use, usual, during = [], [], [], []
    for number in range(rounds):
        place = folder.path.parent / str(number)
        for index, (name, image) in enumerate(zip(names, images, strict=True)):
            (place / "images" / name).mkdir(parents=True, exist_ok=True)
            (place / "images" / name / f"{index}.jpg").write_bytes(image)
        for copy in ("learned", "taught"):
            shutil.copytree(folder.path, place / copy)
        begin = time.monotonic()
        command = [sys.executable, "-m", "engram", "learn", place / "learned", place / "images", "--quiet"]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        learned.append(time.monotonic() - begin)
        with served(ModelFolder(place / "taught")) as server, ProcessPoolExecutor(1) as pool:
            pool.submit(film, server.url, contents, 3).result()
            asking = pool.submit(film, server.url, contents, seconds + 500)
            time.sleep(seconds)
            begin = time.monotonic()
            said = httpx2.post(f"{server.url}/api/teach", files=form(*images), data={"classes": names})
            answers = asking.result()
            job = httpx2.get(f"{server.url}/api/jobs/{said.raise_for_status().json()['id']}").json()
            assert job["state"] == "done", job
        print(f"round {number}: learn {learned[-1]:.1f} s, {len(answers)} answers", flush=True)
        first, *_ = [then + took for then, took, version in answers if version != answers[0][2]]
        in_use.append(first - begin)
        usual += [took for then, took, _ in answers if then + took < begin]
        during += [took for then, took, _ in answers if begin < then + took <= first]

    def at(times: list[float], share: float) -> float:
        return sorted(times)[int(share * (len(times) - 1))]

    return {
        "learn_seconds": [round(each, 2) for each in learned],
        "in_use_seconds": [round(each, 2) for each in in_use],
        "in_use_ratio": round(statistics.median(one / other for one, other in zip(in_use, learned, strict=True)), 2),
        "answers": [len(usual), len(during)],
        "median_seconds": [round(at(usual, 0.5), 4), round(at(during, 0.5), 4)],
        "p95_seconds": [round(at(usual, 0.95), 4), round(at(during, 0.95), 4)],
        "p95_ratio": round(at(during, 0.95) / at(usual, 0.95), 2),
    }


def camera(folder: ModelFolder, rounds: int = 3, seconds: float = 10) -> dict[str, object]:
    """The page in a browser with a fake camera: answers per second, and how soon a class that was shown is known."""
    from playwright.sync_api import expect, sync_playwright

    answers, usable = [], []
    with served(folder) as server, sync_playwright() as started:
        arguments = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = chromium.new_page()
        asked: list[str] = []
        page.on("requestfinished", lambda request: asked.append(request.url))
        page.goto(server.url)
        page.get_by_role("button", name="Start the camera").click()
        expect(page.locator("#live-bars li").first).to_be_visible(timeout=60_000)
        for number in range(rounds):
            asked.clear()
            page.wait_for_timeout(1000 * seconds)
            answers.append(sum("/api/classify" in url for url in asked) / seconds)
            page.get_by_label("What does it show?").fill(f"new {number}")
            page.get_by_role("button", name="Hold to add images", exact=True).hover()
            page.mouse.down()
            expect(page.locator("#held")).to_contain_text(re.compile(r"(1[5-9]|[2-9]\d) images"), timeout=120_000)
            page.mouse.up()
            begin = time.monotonic()
            page.get_by_role("button", name="Teach", exact=True).click()
            known = f"knows {len(CLASSES) + number + 1} classes"
            expect(page.locator("#summary")).to_contain_text(known, timeout=600_000)
            usable.append(time.monotonic() - begin)
        chromium.close()
    return {
        "answers_per_second": [round(each, 1) for each in answers],
        "last_image_to_known_seconds": [round(each, 1) for each in usable],
    }


def swaps(folder: ModelFolder, requests: int = 10_000, times: int = 20) -> dict[str, object]:
    """Requests of two images while the model is exchanged: each answer has the one name of its version."""
    names: dict[int, str] = {load(folder, device="cpu") and folder.current().version: CLASSES[0]}
    contents = [form(jpeg(number), jpeg(number + 1)) for number in range(16)]
    outcomes: dict[tuple[int, frozenset[str]], int] = {}
    errors: list[str] = []
    lock, left = threading.Lock(), [requests]

    def go(url: str, number: int) -> None:
        with httpx2.Client(base_url=url, timeout=120) as client:
            while True:
                with lock:
                    if not left[0]:
                        return
                    left[0] -= 1
                said = client.post("/api/classify?top=100", files=contents[number % len(contents)])
                if said.status_code != 200:
                    errors.append(said.text)
                    continue
                answer = said.json()
                seen = frozenset(
                    each["class"]
                    for prediction in answer["predictions"]
                    for each in prediction["top"]
                    if each["class"] not in CLASSES[1:]
                )
                with lock:
                    key = (answer["version"], seen)
                    outcomes[key] = outcomes.get(key, 0) + 1

    with served(folder) as server:
        threads = [threading.Thread(target=go, args=(server.url, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        name = CLASSES[0]
        for swap in range(times):
            while left[0] > requests * (1 - (swap + 0.5) / times):
                time.sleep(0.01)
            edited = rename(folder, name, f"name {swap}")
            name = f"name {swap}"
            names[edited.version] = name
        for thread in threads:
            thread.join()
    wrong = sum(count for (version, seen), count in outcomes.items() if seen != {names.get(version)})
    return {
        "requests": sum(outcomes.values()) + len(errors),
        "errors": len(errors),
        "answers_of_more_than_one_version": wrong,
        "versions_seen": len({version for version, _ in outcomes}),
        "swaps": times,
    }


# Attacks. Each is repeated, and the memory of the server is measured all the while.


def _png(width: int, height: int, rows: bytes) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def _bombs(server: Server, times: int) -> None:
    bombs = [
        _png(60_000, 60_000, b""),
        _png(7_900, 7_900, bytes(7_900 * (1 + 3 * 7_900))),
        _png(64, 64, bytes(1 << 27)),
    ]
    for number in range(times):
        httpx2.post(f"{server.url}/api/classify", files=form(bombs[number % 3]), timeout=120)


def _noise(server: Server, times: int) -> None:
    numbers = random.Random(0)
    whole = jpeg(0, 400)
    for _ in range(times):
        broken = bytearray(whole)
        for _ in range(20):
            broken[numbers.randrange(len(broken))] = numbers.randrange(256)
        contents = [bytes(broken[: numbers.randrange(1, len(broken))]) for _ in range(8)]
        httpx2.post(f"{server.url}/api/classify", files=form(*contents), timeout=120)


def _endless(server: Server, times: int) -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'
    head = (
        b"POST /api/teach HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    block = b"%x\r\n%s\r\n" % (1 << 20, bytes(1 << 20))
    for _ in range(times):
        with socket.create_connection(("127.0.0.1", server.port), 30) as connection, suppress(OSError):
            connection.sendall(head + b"%x\r\n%s\r\n" % (len(part), part))
            for _ in range(400):
                connection.sendall(block)


def _silent(server: Server, times: int) -> None:
    held = []
    for number in range(times):
        with suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", server.port), 5)
            connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * (number % 8_000))
            held.append(connection)
    time.sleep(1)
    for connection in held:
        connection.close()


def _guesses(server: Server, times: int) -> None:
    with httpx2.Client(base_url=server.url) as client:
        for number in range(times):
            client.get(f"/made/up/{number}", headers={"Authorization": f"Bearer {number:0100}"})


def _updates(server: Server, times: int) -> None:
    """More updates than there is room for, of files that are no images."""
    for number in range(times):
        files = form(*[os.urandom(200_000) for _ in range(5)])
        data = {"classes": [f"made up {number}"] * 5}
        httpx2.post(f"{server.url}/api/teach", files=files, data=data, timeout=120)


ATTACKS = {"bombs": (_bombs, 60), "noise": (_noise, 150), "endless": (_endless, 6), "silent": (_silent, 2_000)}
ATTACKS |= {"guesses": (_guesses, 2_000), "updates": (_updates, 150)}


def attack(folder: ModelFolder) -> dict[str, object]:
    """How much more memory the server takes, at the most while each is done, and after all of them were, twice."""
    found: dict[str, object] = {}
    with served(folder) as server:
        contents = [[jpeg(32 * turn + number) for number in range(32)] for turn in range(4)]
        in_another(ask, server.url, contents, 5, 4)
        before = server.bytes()
        for turn in ("first", "second"):
            for name, (carry_out, times) in ATTACKS.items():
                peak, stop = [0], threading.Event()

                def watch(peak: list[int] = peak, stop: threading.Event = stop) -> None:
                    while not stop.wait(0.05):
                        peak[0] = max(peak[0], server.bytes())

                watcher = threading.Thread(target=watch)
                watcher.start()
                carry_out(server, times)
                stop.set()
                watcher.join()
                found[f"{name}_peak_growth_mb_{turn}"] = round((peak[0] - before) / 2**20, 1)
                assert httpx2.get(f"{server.url}/readyz", timeout=60).status_code == 200
            time.sleep(3)
            found[f"growth_after_mb_{turn}"] = round((server.bytes() - before) / 2**20, 1)
        assert ask(server.url, contents, 1, 1)
    return {"at_rest_mb": round(before / 2**20, 1), **found}


PARTS = {"throughput": throughput, "single": single, "camera": camera, "updating": updating, "swaps": swaps}
PARTS |= {"attack": attack}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="part")
    chosen = parser.parse_args().parts or list(PARTS)
    found: dict[str, object] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in chosen:
        with tempfile.TemporaryDirectory() as place:
            measured = PARTS[name](make_model(Path(place) / "model"))
        found[name] = {**measured, "load_average": round(os.getloadavg()[0], 1)}  # of the last minute
        print(name, json.dumps(found[name], indent=1), flush=True)
        RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
