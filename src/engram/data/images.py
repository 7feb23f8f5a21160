"""Decode an image file, or its bytes, into pixels; an error says what was found instead."""

from __future__ import annotations

import codecs
import importlib
import io
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile
from torch import Tensor

from engram.data import heif
from engram.errors import DataError, UsageError, not_installed

LIMIT = 64_000_000  # pixels: enough for cameras of 61 megapixels; up to 1.2 GB of memory while one is decoded
MAX_SIDE = 100_000  # pixels, more than a JPEG can have; each row costs memory, and a PNG may have millions
MAX_BYTES = 1 << 29  # of a file: more than LIMIT pixels take in any of the formats
MAX_HEIC_PIXELS = 4  # times the limit: an image, its tiles, and the same for its alpha plane
MAX_SCANS = 100  # of a JPEG, which usually has ten; each costs a pass over all pixels, and a few bytes in the file

Fit = Literal["middle", "stretch"]  # how an image becomes a square: its middle, or all of it with both sides scaled


class UnreadableImage(DataError):
    """An image that cannot be decoded. The message begins with "It", so that the name of the file can precede it."""


class _Jpeg(JpegImageFile):
    """A JPEG whose EXIF block is not searched for a resolution, which would warn of damage there."""

    def _read_dpi_from_exif(self) -> None:
        pass


def _heic(file: BinaryIO) -> ImageFile.ImageFile:
    """pillow-heif's decoder, not registered with Pillow, so that `Image.open` does not change for anyone else."""
    try:
        image: ImageFile.ImageFile = importlib.import_module("pillow_heif").HeifImageFile(file)
    except ImportError as error:
        advice = not_installed("To read it, pillow-heif", "heic")
        raise UnreadableImage(f"Its format is HEIC. {advice}; or convert it to JPEG.") from error
    return image


# The only decoders that a file can reach, chosen by its first bytes. `Image.open` would do more: it passes JPEGs that
# contain several images to another decoder, and its warnings about large images cannot be turned off per thread.
DECODERS: dict[str, Callable[[BinaryIO], ImageFile.ImageFile]] = {
    "JPEG": _Jpeg,
    "PNG": PngImageFile,
    "WebP": WebPImageFile,
    "BMP": BmpImageFile,
    "GIF": GifImageFile,
    "HEIC": _heic,
}
READ = "only JPEG, PNG, WebP, BMP, GIF and HEIC are read"
REMEDIES = {"ZIP": "unpack", "gzip": "unpack", "a video": "extract images from"}  # for the rest: convert

# (offset, bytes, format); the first match counts
SIGNATURES = (
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (8, b"WEBP", "WebP"),
    (0, b"BM", "BMP"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (0, b"II*\0", "TIFF or camera raw"),
    (0, b"MM\0*", "TIFF or camera raw"),
    (0, b"8BPS", "Photoshop"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"%PDF", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"\xc5\xd0\xd3\xc6", "PostScript"),
    (4, b"ftypavi", "AVIF"),
    (4, b"ftyphe", "HEIC"),
    (4, b"ftypmi", "HEIC"),
    (4, b"ftypmsf1", "HEIC"),
    (4, b"ftyp", "a video"),
    (4, b"jP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (4, b"JXL ", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"PK\3\4", "ZIP"),
    (0, b"\x1f\x8b", "gzip"),
    *((0, b"P%d%c" % (number, space), "PPM") for number in range(1, 7) for space in b"\n\r\t "),
)

# EXIF's orientations other than 1: the transposition that turns the stored image upright.
TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
EXIF_AS_TEXT = "Raw profile type exif"  # the name of a PNG text in which ImageMagick stores EXIF
EXIF_INTEGERS = {1: "B", 3: "H", 4: "I"}  # EXIF's integer types, as `struct` names them

JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # those that a length follows, and the end
SCAN, JPEG_END = b"\xff\xda", b"\xff\xd9"
ANIMATION = (b"acTL", b"fcTL", b"fdAT")  # PNG chunks that programs without animation ignore
FRAME, EXTENSION = b",!"  # the first bytes of a GIF's blocks


def decode(
    source: str | os.PathLike[str] | bytes, *, size: int | None = None, fit: Fit = "middle", limit: int = LIMIT
) -> Tensor:
    """The image of a file, or of the bytes of one, upright and in colour: uint8 (h, w, 3).

    With `size`, a square: the shorter side scaled to `size` and the middle of the longer one or, to "stretch", both
    sides scaled. Of an animation, the first frame. More than `limit` pixels are refused before any is decoded.
    """
    if size is not None:
        check_side(size)
    with _opened(source, limit) as (image, kind, content):
        extent = _draft(image, size)
        image.load()  # before EXIF is read: in a PNG it may come after the pixels
        if kind == "PNG":
            _scale_transparency(image, bits=content[24])
        result = _in_colour(image, kind)
        if size is not None:
            result = _square(result, size, extent, fit)
        if result.mode == "RGBA":  # on white, the paper that drawings and cut-outs are made for
            result = Image.alpha_composite(Image.new("RGBA", result.size, "white"), result).convert("RGB")
        orientation = _orientation(image.info)
        if orientation in TRANSPOSITIONS:
            result = result.transpose(TRANSPOSITIONS[orientation])
        return torch.from_numpy(np.array(result))


def extent(source: str | os.PathLike[str] | bytes, *, limit: int = LIMIT) -> tuple[int, int]:
    """(width, height) in pixels, from the header alone: as stored, or for HEIC as rotated."""
    with _opened(source, limit) as (image, _, _):
        return image.size


def check_side(size: int) -> None:
    """Refuse what cannot be the side of an image."""
    if size < 1:
        raise UsageError(f"The side of an image must be at least 1 pixel; found {size}.")


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of an image file."""
    if not os.path.isfile(path):  # a pipe or a device could be read for ever
        raise UnreadableImage("It is not a file." if os.path.exists(path) else "There is no such file.")
    try:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            if length > MAX_BYTES:
                what = f"more than any image of at most {LIMIT:,} pixels"
                raise UnreadableImage(f"It has {length:,} bytes, {what}. Make it smaller.")
            return file.read()
    except OSError as error:
        raise UnreadableImage(f"It cannot be opened: {error.strerror}.") from error


@contextmanager
def _opened(source: str | os.PathLike[str] | bytes, limit: int) -> Iterator[tuple[ImageFile.ImageFile, str, bytes]]:
    """The image with its header read, its format, and its bytes, within the limits; any error is `UnreadableImage`."""
    content = source if isinstance(source, bytes) else read_file(source)
    kind = _kind(content)
    try:
        if kind == "HEIC":
            content = _primary_image(content, limit)
        elif kind == "PNG":
            content = _still_png(content)
        elif kind in ("WebP", "GIF"):  # their decoders allocate memory for all pixels when they are created
            _check_size(_webp_size(content) if kind == "WebP" else _gif_size(content), limit)
        image = DECODERS[kind](io.BytesIO(content))
        _check_size(image.size, limit)
        if kind == "JPEG" and (scans := _scans(content)) > MAX_SCANS:
            raise UnreadableImage(f"It is a JPEG in {scans:,} scans; usual are ten. Save it again.")
        yield image, kind, content
    except UnreadableImage:
        raise
    except MemoryError as error:
        raise UnreadableImage("There is not enough memory to decode it. Make it smaller.") from error
    except Exception as error:  # decoders raise errors of any type over damaged files
        raise UnreadableImage(
            f"It begins like a {kind}, but is damaged, truncated, or has far too much metadata. Copy or save it again."
        ) from error


# Which format


def _kind(content: bytes) -> str:
    """Which of `DECODERS` the bytes are for; otherwise an error that says what they seem to be."""
    for start, signature, name in SIGNATURES:
        if content[start : start + len(signature)] == signature:
            if name in DECODERS:
                return name
            raise UnreadableImage(f"Its format is {name}, and {READ}: {REMEDIES.get(name, 'convert')} it.")
    raise UnreadableImage(_unrecognised(content))


def _unrecognised(content: bytes) -> str:
    if not content.strip(b"\0"):
        return f"It {'holds only zero bytes' if content else 'is empty'}. Copy it again."
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(content[:1024]).lower()  # may end within a letter
    except UnicodeDecodeError:
        text = "\0"
    if not all(letter.isprintable() or letter.isspace() for letter in text):
        return f"Its format is unknown: it begins with the bytes {content[:8].hex(' ')}, and {READ}."
    if text.startswith("version https://git-lfs"):
        return "It is a pointer of Git LFS instead of an image. Run 'git lfs pull'."
    if "<svg" in text:
        return f"Its format is SVG, and {READ}: convert it."
    if "<html" in text or "<!doctype html" in text:
        return "It is a web page, as servers send in place of a missing image. Download it again."
    return f"It is text, and {READ}."


# Limits on pixels and work


def _check_size(size: tuple[int, int], limit: int) -> None:
    width, height = size
    if width * height > limit or max(size) > MAX_SIDE:
        most = f"at most {limit:,} in all" if width * height > limit else f"sides of at most {MAX_SIDE:,}"
        raise UnreadableImage(f"It is {width:,} x {height:,} pixels; {most} are decoded. Make it smaller.")


def _primary_image(content: bytes, limit: int) -> bytes:
    """A HEIC file reduced to its primary image, if that is within the limits.

    The EXIF block is removed: libheif rotates the image by its properties, and EXIF would rotate it again.
    """
    try:
        reduced, size, pixels = heif.primary_image(content)
    except heif.Unsupported as error:
        name = "AVIF" if error.kind == "av01" else f"HEIF with '{error.kind}'"
        raise UnreadableImage(f"Its format is {name}, and {READ}: convert it.") from error
    _check_size(size, limit)
    if pixels > MAX_HEIC_PIXELS * limit:
        raise UnreadableImage(f"It is a HEIC whose tiles have {pixels:,} pixels in all. Save it again.")
    return reduced


def _still_png(content: bytes) -> bytes:
    """A PNG without animation, its checksums verified: Pillow does not verify those of the pixels."""
    parts = [content[:8]]
    name, place = b"", 8
    while name != b"IEND":
        length, name = struct.unpack_from(">I4s", content, place)
        end = place + 8 + length
        if struct.pack(">I", zlib.crc32(content[place + 4 : end])) != content[end : end + 4]:
            raise ValueError("checksum")
        if name not in ANIMATION:
            parts.append(content[place : end + 4])
        place = end + 4
    return b"".join(parts)


def _webp_size(content: bytes) -> tuple[int, int]:
    """(width, height) of a WebP."""
    if content[12:16] == b"VP8X":
        return 1 + int.from_bytes(content[24:27], "little"), 1 + int.from_bytes(content[27:30], "little")
    if content[12:16] == b"VP8L":
        (bits,) = struct.unpack_from("<I", content, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", content, 26)
    return width & 0x3FFF, height & 0x3FFF


def _gif_size(content: bytes) -> tuple[int, int]:
    """(width, height) of a GIF, enlarged to contain its first frame."""
    width, height, flags = struct.unpack_from("<HHB", content, 6)
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)  # after the palette
    while content[place] != FRAME:
        if content[place] == EXTENSION:
            place += 2
            while content[place]:
                place += 1 + content[place]
        place += 1
    left, top, across, down = struct.unpack_from("<4H", content, place + 1)
    return max(width, left + across), max(height, top + down)


def _scans(content: bytes) -> int:
    """The number of scans of a JPEG up to its end marker, without which half an image could pass for a whole one."""
    scans = 0
    marker = JPEG_MARKER.search(content)
    while marker and marker[0] != JPEG_END:
        scans += marker[0] == SCAN
        length = int.from_bytes(content[marker.end() : marker.end() + 2])
        marker = JPEG_MARKER.search(content, marker.end() + length)
    if marker is None:
        raise EOFError
    return scans


# Pixels


def _draft(image: ImageFile.ImageFile, size: int | None) -> tuple[float, float]:
    """Let a JPEG be decoded at 1/2, 1/4 or 1/8 where that is still twice `size`; the (width, height) of the result."""
    if size is not None and (drafted := image.draft(None, (2 * size, 2 * size))):
        _, (_, _, width, height) = drafted
        return width, height  # fractions: the last row and column of pixels may stand for less than the others
    return image.size


def _scale_transparency(image: Image.Image, bits: int) -> None:
    """Scale the transparent colour of a PNG to eight bits, as Pillow has scaled the pixels."""
    colour = image.info.get("transparency")
    if image.mode == "L" and isinstance(colour, int) and bits < 8:
        image.info["transparency"] = colour * 255 // (2**bits - 1)
    elif image.mode == "RGB" and isinstance(colour, tuple) and bits == 16:
        image.info["transparency"] = tuple(value >> 8 for value in colour)


def _in_colour(image: Image.Image, kind: str) -> Image.Image:
    """In RGB, or in RGBA where parts may be transparent."""
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip at 255
        grey = np.asarray(image).astype(np.uint32)
        grey[grey == image.info.get("transparency")] = 0xFFFF
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    mode = "RGBA" if image.has_transparency_data else "RGB"
    image = image if image.mode == mode else image.convert(mode)
    if kind == "BMP" and mode == "RGBA" and image.getchannel("A").getextrema() == (0, 0):
        return image.convert("RGB")  # many programs leave zeros in the fourth byte
    return image


def _square(image: Image.Image, size: int, extent: tuple[float, float], fit: Fit) -> Image.Image:
    width, height = extent
    left, top = (0.0, 0.0) if fit == "stretch" else ((width - min(extent)) / 2, (height - min(extent)) / 2)
    return image.resize((size, size), Image.Resampling.BICUBIC, (left, top, width - left, height - top))


def _orientation(information: Mapping[Any, Any]) -> int:
    """EXIF's orientation, 1 to 8; 1 where it is missing or damaged.

    Pillow's `getexif` reads every tag: thousands of them may refer to the same megabytes.
    """
    try:
        if "exif" in information:
            block = information["exif"].removeprefix(b"Exif\0\0")
        else:  # a name, a length, and hexadecimal digits; Pillow limits the length
            block = bytes.fromhex("".join(information[EXIF_AS_TEXT].split("\n")[3:])).removeprefix(b"Exif\0\0")
        order = "<" if block.startswith(b"II") else ">"
        (start,) = struct.unpack_from(order + "I", block, 4)
        (entries,) = struct.unpack_from(order + "H", block, start)
        for place in range(start + 2, start + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(order + "HH", block, place)
            if tag == ExifTags.Base.Orientation and kind in EXIF_INTEGERS:
                return int(struct.unpack_from(order + EXIF_INTEGERS[kind], block, place + 8)[0])
    except (struct.error, KeyError, ValueError, TypeError, AttributeError):  # no EXIF, or another kind of text
        pass
    return 1
