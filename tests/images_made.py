"""Image files, written by Pillow where it can, and byte by byte where it cannot."""

from __future__ import annotations

import importlib.util
import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

Pixels = npt.NDArray[np.uint8]

WITH_HEIC = importlib.util.find_spec("pillow_heif") is not None
needs_heic = pytest.mark.skipif(not WITH_HEIC, reason="pillow-heif is not installed (the extra heic)")


def gradient(height: int = 24, width: int = 32) -> Pixels:
    """A smooth image (h, w, 3) that is different in each corner and in each channel."""
    y, x = np.mgrid[0:height, 0:width]
    down, right = y * 255 / max(height - 1, 1), x * 255 / max(width - 1, 1)
    return np.stack([right, down, (right + 255 - down) / 2], axis=-1).astype(np.uint8)


def on_white(colour: Pixels, opacity: Pixels) -> Pixels:
    """The image (h, w, 3) where it is opaque (h, w), and white where it is not."""
    share = opacity[..., None] / 255
    return np.rint(colour * share + 255 * (1 - share)).astype(np.uint8)


def encoded(image: Image.Image | Pixels, format: str, **options: Any) -> bytes:
    """The file that Pillow writes."""
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, format, **options)
    return file.getvalue()


def heic(*images: Image.Image | Pixels, **options: Any) -> bytes:
    """The HEIC file that pillow-heif writes, lossless by default; the first image is the primary one."""
    import pillow_heif

    stored = pillow_heif.HeifFile()
    for image in images:
        stored.add_from_pillow(image if isinstance(image, Image.Image) else Image.fromarray(image))
    file = io.BytesIO()
    stored.save(file, **{"quality": -1, "chroma": 444, "matrix_coefficients": 0, "primary_index": 0, **options})
    return file.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(
    width: int, height: int, depth: int, colour: int, rows: bytes, before: bytes = b"", after: bytes = b""
) -> bytes:
    """A PNG from its parts; `rows` are the filtered rows, `before` and `after` chunks around the pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + before + pixels + after + chunk(b"IEND", b"")


def grey_16(values: npt.NDArray[np.uint16], before: bytes = b"") -> bytes:
    """A PNG of one row of 16-bit grey values."""
    return png(len(values), 1, 16, 0, b"\0" + values.astype(">u2").tobytes(), before)


def bmp_32(pixels: Pixels) -> bytes:
    """A BMP of (h, w, 4), whose header says that the fourth byte is opacity."""
    height, width, _ = pixels.shape
    rows = pixels[::-1, :, [2, 1, 0, 3]].tobytes()  # from the bottom up, blue first
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    info = struct.pack("<IiiHHIIiiII", 108, width, height, 1, 32, 3, len(rows), 0, 0, 0, 0) + masks + bytes(52)
    return b"BM" + struct.pack("<IHHI", 14 + len(info) + len(rows), 0, 0, 14 + len(info)) + info + rows


def exif(orientation: int, order: str = ">", kind: int = 3) -> bytes:
    """An EXIF block with nothing but the orientation; `kind` is EXIF's type of number."""
    value = struct.pack(order + {1: "B", 3: "H", 4: "I"}[kind], orientation).ljust(4, b"\0")
    head = b"II*\0" if order == "<" else b"MM\0*"
    return b"Exif\0\0" + head + struct.pack(order + "IHHHI", 8, 1, 0x0112, kind, 1) + value + bytes(4)


def ycck(pixels: Pixels) -> bytes:
    """A JPEG in YCCK as Adobe's programs write it, of RGB pixels: the inks as YCbCr, and black, inverted."""
    planes = [*Image.fromarray(255 - pixels).convert("YCbCr").split(), Image.new("L", pixels.shape[1::-1], 255)]
    stored = Image.merge("CMYK", [plane.point(lambda value: 255 - value) for plane in planes])  # Pillow inverts them
    return encoded(stored, "JPEG", quality=100).replace(b"Adobe\0d\0\0\0\0\0", b"Adobe\0d\0\0\0\0\2")


def several_frames(format: str, **options: Any) -> bytes:
    """An animation: a gradient, then black."""
    first = Image.fromarray(gradient())
    if format == "GIF":
        first = first.quantize(64)
    return encoded(first, format, save_all=True, append_images=[Image.new("RGB", first.size)], **options)


def scans(content: bytes, count: int) -> bytes:
    """A progressive JPEG with its first scan repeated `count` times."""
    start = content.index(b"\xff\xda")
    end = content.index(b"\xff\xc4", start)
    return content[:start] + count * content[start:end] + content[start:]
