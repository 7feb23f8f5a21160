"""Images and folders of every kind, valid and damaged, and docs/images.md, which says what engram does with each.

The page quotes engram: `python tests/images_page.py` writes it, and a test checks that it is up to date.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from images_made import (
    WITH_HEIC,
    Pixels,
    bmp_32,
    chunk,
    encoded,
    exif,
    gradient,
    grey_16,
    heic,
    on_white,
    png,
    scans,
    several_frames,
    ycck,
)
from PIL import Image

from engram.data.images import LIMIT, MAX_BYTES, UnreadableImage, decode
from engram.data.labelled import read_images, scan
from engram.data.scanning import EXTENSIONS
from engram.errors import EngramError
from engram.model import LearnOptions, plan_update

PAGE = Path(__file__).parent.parent / "docs" / "images.md"
GRADIENT = gradient()
ROWS = b"".join(b"\0" + row.tobytes() for row in GRADIENT)
JPEG = encoded(GRADIENT, "JPEG", quality=95)
PNG = encoded(GRADIENT, "PNG")
FADING = np.tile(np.linspace(0, 255, 32).astype(np.uint8), (24, 1))
RAMP = np.arange(0, 65536, 3000, dtype=np.uint16)


@dataclass(frozen=True)
class Case:
    """An image file. If it can be read: how, and its pixels with the largest difference in steps of 256."""

    what: str
    content: bytes
    how: str = ""
    seen: Pixels | None = None
    tolerance: int = 0


def grey(values: np.ndarray) -> Pixels:
    return np.stack([values.astype(np.uint8)] * 3, -1)


TURNED, MISTURNED = (encoded(GRADIENT, "PNG", exif=block) for block in (exif(6), exif(6)[:20]))
QUANTISED = Image.fromarray(GRADIENT).quantize(64)
COARSE = np.array(QUANTISED.convert("RGB"))
RED = GRADIENT[..., 0]

# Without pillow-heif these are empty, and the tests of them are skipped.
HEIC = heic(GRADIENT) if WITH_HEIC else b""
HEIC_TURNED = heic(GRADIENT, exif=exif(6)) if WITH_HEIC else b""
HEIC_OF_TWO = heic(GRADIENT, Image.new("RGB", (8, 8))) if WITH_HEIC else b""

READ = (
    Case("JPEG", JPEG, "as it is", GRADIENT, 16),
    Case("JPEG, progressive", encoded(GRADIENT, "JPEG", quality=95, progressive=True), "as it is", GRADIENT, 16),
    Case("JPEG in CMYK or YCCK", ycck(GRADIENT), "in colours, on white paper", GRADIENT, 6),
    Case(
        "JPEG that contains several images, as some phones write it",
        encoded(GRADIENT, "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))], quality=95),
        "the first",
        GRADIENT,
        16,
    ),
    Case("JPEG with data appended, as some phones write it", JPEG + b"\xff\xda\0\2 video", "as it is", GRADIENT, 16),
    Case("JPEG, PNG or WebP with an EXIF orientation", TURNED, "upright", np.rot90(GRADIENT, -1)),
    Case("the same, with a damaged EXIF block", MISTURNED, "as stored", GRADIENT),
    Case("PNG", PNG, "as it is", GRADIENT),
    Case("PNG, grey or black and white", encoded(RED, "PNG"), "three equal channels", grey(RED)),
    Case("PNG of 16 bits", grey_16(RAMP), "in 256 steps, black to white", grey(np.rint(RAMP / 257))[None]),
    Case("PNG, GIF or BMP with a palette", encoded(QUANTISED, "PNG"), "in its colours", COARSE),
    Case(
        "PNG, WebP, GIF or BMP that is transparent in places",
        encoded(np.dstack([GRADIENT, FADING]), "PNG"),
        "on white",
        on_white(GRADIENT, FADING),
        1,
    ),
    Case("PNG, animated", several_frames("PNG"), "its first frame", GRADIENT),
    Case("WebP", encoded(GRADIENT, "WEBP", lossless=True), "as it is", GRADIENT),
    Case("WebP, animated", several_frames("WEBP", lossless=True), "its first frame", GRADIENT),
    Case("GIF", encoded(QUANTISED, "GIF"), "in its colours", COARSE),
    Case("GIF, animated", several_frames("GIF"), "its first frame", GRADIENT, 40),
    Case("BMP", encoded(GRADIENT, "BMP"), "as it is", GRADIENT),
    Case("BMP with zeros where opacity could be", bmp_32(np.dstack([GRADIENT, 0 * FADING])), "as opaque", GRADIENT),
    Case("HEIC, the format of iPhones", HEIC, "as it is; needs pillow-heif", GRADIENT),
    Case("HEIC with a rotation", HEIC_TURNED, "upright", np.rot90(GRADIENT, -1)),
    Case("HEIC that contains several images", HEIC_OF_TWO, "the primary one", GRADIENT),
    Case("one pixel", encoded(GRADIENT[:1, :1], "PNG"), "as it is", GRADIENT[:1, :1]),
)

ZEROS = zlib.compress(bytes(20_000_000), 9)


def damaged(content: bytes) -> bytes:
    """The content with one bit in the middle flipped."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


REFUSED = (
    Case("an empty file", b""),
    Case("only zero bytes", bytes(5000)),
    Case("a JPEG that is truncated", JPEG[: len(JPEG) // 2]),
    Case("a JPEG whose second half was never copied", JPEG[: len(JPEG) // 2] + bytes(len(JPEG) // 2)),
    Case("a PNG that is truncated", PNG[: len(PNG) // 2]),
    Case("a PNG with one wrong bit", damaged(PNG)),
    Case("a GIF that is truncated", encoded(QUANTISED, "GIF")[:600]),
    Case("a web page in place of an image", b"<!DOCTYPE html>\n<html><title>404</title></html>"),
    Case("a Git LFS pointer in place of an image", b"version https://git-lfs.github.com/spec/v1\n"),
    Case("text", b"Dear Sir or Madam"),
    Case("an unknown format", b"\x01\x02\x03\xfe"),
    Case("TIFF, or camera raw", encoded(GRADIENT, "TIFF")),
    Case("AVIF", b"\0\0\0\x1cftypavif\0\0\0\0"),
    Case("SVG", b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>'),
    Case("PDF", b"%PDF-1.7\n"),
    Case("PostScript", b"%!PS-Adobe-3.0 EPSF-3.0\n"),
    Case("Photoshop", b"8BPS\0\1" + bytes(20)),
    Case("JPEG 2000", b"\0\0\0\x0cjP  \r\n\x87\n"),
    Case("JPEG XL", b"\0\0\0\x0cJXL \r\n\x87\n"),
    Case("ICO", encoded(GRADIENT, "ICO")),
    Case("PPM", encoded(GRADIENT, "PPM")),
    Case("a video", b"\0\0\0\x18ftypmp42\0\0\0\0"),
    Case("ZIP, which includes Office files", b"PK\3\4" + bytes(30)),
    Case("gzip", b"\x1f\x8b\x08" + bytes(10)),
    Case("too many pixels, in a few bytes or in many", png(2**31 - 1, 2**31 - 1, 8, 6, b"")),
    Case(
        "a PNG whose compressed metadata is huge",
        png(32, 24, 8, 2, ROWS, before=chunk(b"zTXt", b"Comment\0\0" + ZEROS)),
    ),
    Case("a JPEG of a thousand scans", scans(encoded(GRADIENT, "JPEG", progressive=True), 1000)),
    Case("an image without pixels", png(0, 24, 8, 2, b"")),
)


@dataclass(frozen=True)
class Place:
    """A folder or list, a function that makes it, and whether anything of it is learned."""

    what: str
    make: Callable[[Path], None]
    learned: bool = True
    source: str = "images"


def files(*names: str | bytes) -> Callable[[Path], None]:
    """Makes images under these names."""

    def make(folder: Path) -> None:
        for name in names:
            path = folder / os.fsdecode(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(PNG)

    return make


def beside(*names: str, **others: Callable[[Path], object]) -> Callable[[Path], None]:
    """Makes images under these names, and then, under cat, `others`: by their names, with an underscore for a dot."""

    def make(folder: Path) -> None:
        files(*names)(folder)
        for name, write in others.items():
            path = folder / "cat" / name.replace("_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)

    return make


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def listed(text: str | bytes) -> Callable[[Path], None]:
    """Makes images/cat/1.png, images/dog/1.png and a list beside them."""

    def make(folder: Path) -> None:
        files("cat/1.png", "dog/1.png")(folder)
        (folder / "list.csv").write_bytes(text if isinstance(text, bytes) else text.encode())

    return make


def too_long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # takes no room on the disk


BOTH = ("cat/1.png", "dog/1.png")
LIST = "images/list.csv"

PLACES = (
    Place("a sub-folder per class", files("cat/1.png", "cat/2.png", "dog/1.png")),
    Place("folders inside a class", files("cat/1.png", "cat/kittens/2.png", "dog/1.png")),
    Place("an extension in capitals, or of another format", files(*BOTH, "cat/a.JPG")),
    Place(
        "hidden files and those that operating systems create",
        files(*BOTH, "cat/._1.png", "__MACOSX/1.png", "Thumbs.db"),
    ),
    Place("a file without the extension of an image", beside(*BOTH, notes_txt=Path.touch)),
    Place("an image that cannot be read", beside(*BOTH, b_png=Path.touch)),
    Place("a file that is larger than any image", beside(*BOTH, film_jpg=too_long)),
    Place("an image beside the classes", files(*BOTH, "3.png")),
    Place("a class without images", beside(*BOTH, **{"../emu": Path.mkdir})),
    Place("a link to a folder or an image", beside(*BOTH, more=link("../dog"))),
    Place("a link that leads nowhere", beside(*BOTH, gone_png=link("nowhere"))),
    Place("a link to a folder that contains it", beside(*BOTH, around=link(".."))),
    Place("a pipe or a device", beside(*BOTH, pipe_png=os.mkfifo)),
    Place("a name with accents, in either encoding", files("cafe\u0301/1.png", "dog/1.png")),
    Place("a name with blanks around it", files(" cat /1.png", "dog/1.png")),
    Place("a name of a file that is not UTF-8", files(*BOTH, b"cat/\xff.png")),
    Place("a class called like a part of a data set", files("train/1.png", "plane/1.png")),
    Place("an empty folder", Path.mkdir, learned=False),
    Place("images without classes", files("1.png", "2.png"), learned=False),
    Place("a folder above the class folders", files("train/cat/1.png", "test/cat/2.png"), learned=False),
    Place("a class without a readable image", beside("dog/1.png", a_png=Path.touch), learned=False),
    Place("two classes that differ in capitals", files("Cat/1.png", "cat/1.png"), learned=False),
    Place("two that differ in the encoding of accents", files("caf\u00e9/1.png", "cafe\u0301/1.png"), learned=False),
    Place("two that differ in spaces at the end", files("cat/1.png", "cat /1.png"), learned=False),
    Place("a name of a class that is not UTF-8", files(b"k\xe4fer/1.png"), learned=False),
    Place("a name of a class that cannot be shown", files("a\x07b/1.png"), learned=False),
    Place("a file that is not a list", files("1.png"), learned=False, source="images/1.png"),
    Place("a path that does not exist", files(*BOTH), learned=False, source="elsewhere"),
    Place("a list", listed("path,label\ncat/1.png,cat\ndog/1.png,dog\n"), source=LIST),
    Place(
        "a list without a header, from a spreadsheet",
        listed(b"\xef\xbb\xbfcat/1.png,cat\r\n\r\ndog/1.png,dog"),
        source=LIST,
    ),
    Place("a list with other columns", listed("who,label,path\nme,cat,cat/1.png\nyou,dog,dog/1.png\n"), source=LIST),
    Place("a line that repeats another", listed("cat/1.png,cat\ndog/1.png,dog\n./cat/1.png,cat\n"), source=LIST),
    Place("a list without images", listed("path,label\n"), learned=False, source=LIST),
    Place("a list with semicolons", listed("path;label\ncat/1.png;cat\n"), learned=False, source=LIST),
    Place("a list in UTF-16", listed("path,label\n".encode("utf-16")), learned=False, source=LIST),
    Place(
        "a list with errors",
        listed("path,label\ncat/9.png,cat\ndog/1.png,\n,dog\ncat/1.png,cat,1\ncat/1.png,cat\ncat/1.png,dog\n"),
        learned=False,
        source=LIST,
    ),
)


def refusal(content: bytes) -> str:
    """Why an image cannot be read."""
    try:
        decode(content)
    except UnreadableImage as error:
        return str(error)
    return ""


def outcome(place: Place) -> tuple[bool, str]:
    """Whether anything was learned, and the message."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        place.make(Path("images"))
        try:
            found = scan(place.source)
            plan_update(None, found, LearnOptions(network="small"))
            images = read_images(found, 8)
        except EngramError as error:
            return False, str(error)
        counts = Counter(images.class_names[label] for label in images.samples.labels.tolist())
        skipped = [f"Skipped: {each}" for each in (*found.skipped, *images.unreadable)]
        learned = ", ".join(f"{name} {count}" for name, count in counts.items())
        return True, " ".join([f"Learned: {learned}.", *skipped])


def cell(text: str) -> str:
    """Text in a table of Markdown."""
    for letter in "\\`*_[]<|":
        text = text.replace(letter, f"\\{letter}")
    return text


def table(first: str, second: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {first} | {second} |", "|---|---|", *(f"| {cell(one)} | {cell(other)} |" for one, other in rows)]
    return "\n".join(lines)


def page() -> str:
    """docs/images.md as it should be."""
    outcomes = [(place.what, outcome(place)) for place in PLACES]
    return TEMPLATE.format(
        extensions=", ".join(f"`{each}`" for each in EXTENSIONS),
        limit=f"{LIMIT:,}",
        read=table("image", "is read", [(each.what, each.how) for each in READ]),
        refused=table("file", "message", [(each.what, refusal(each.content)) for each in REFUSED]),
        learned=table("folder or list", "result", [(what, said) for what, (good, said) in outcomes if good]),
        errors=table("folder or list", "error", [(what, said) for what, (good, said) in outcomes if not good]),
    )


TEMPLATE = """\
<!-- Written by: .venv/bin/python tests/images_page.py
     It quotes what engram says of the cases in that file. Change those, and run it. -->

# Images

`engram learn` and `engram evaluate` take a folder with one sub-folder per class, or a list:

```text
images/cat/1.jpg           path,label
images/cat/kitten/2.jpg    cat/1.jpg,cat
images/dog/1.png           dog/1.png,dog
```

`engram predict` takes images, folders, and `-` for a list on stdin, one path per line. In folders, images are
recognised by their extensions: {extensions}.
Files that are named in a list, or to `predict`, may have any name. The content decides how a file is decoded.

Skipped files are reported on stderr, each with the reason, and with `--json` under `skipped`. Files that cannot be
decoded are not learned, and nothing replaces them. `predict` classifies the others, and exits with 1.

## Images that are read

{read}

An image becomes the square that the network takes: the shorter side is scaled to the model's size, and the middle of
the longer one is used. At most {limit} pixels are decoded.

HEIC photos need the package pillow-heif (`pip install -c constraints.txt -e '.[heic]'`). Without it, HEIC files are
skipped, and the message says so. Of a HEIC file, the primary image is read, with its rotation and its alpha plane;
thumbnails, depth maps and HDR gain maps are ignored.

## Files that are not read

{refused}

## Folders and lists

{learned}

These are refused, and nothing is changed:

{errors}

## Names

Names of files and classes are printed on one line: characters that a terminal cannot print, or that would control it,
are escaped, such as `\\n` or `\\x1b`. JSON has every name as it is, with its own escapes; from a name that is not
UTF-8, Python's `os.fsencode` restores the bytes. In CSV, a cell that a spreadsheet would take for a formula begins with
an apostrophe.

A list on stdin ends each path at a newline, so a path that contains one cannot be listed; name it, or its folder.
Blank lines and the carriage returns of Windows are ignored. To name a file called `-`, write `./-`.
"""


if __name__ == "__main__":
    text = page()
    changed = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {'written' if changed else 'up to date'}\n")
