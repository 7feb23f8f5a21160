"""Pictures as people have them: a file, or its bytes, becomes pixels, or an error says what was found instead."""

from __future__ import annotations

import codecs
import importlib
import io
import os
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile
from torch import Tensor

from engram.data import heif
from engram.errors import DataError, UsageError, not_installed

LIMIT = 64_000_000  # pixels: what cameras of 61 megapixels take fits; up to 1.2 GB of memory while they are decoded
MAX_SIDE = 100_000  # pixels, more than a JPEG can have: each row takes memory of its own, and a PNG may have millions
MAX_BYTES = 1 << 29  # of a file: more than LIMIT pixels take in any of the formats
MAX_HEIC_PIXELS = 4  # times the limit: an image, the tiles it is made of, and the same for its alpha plane
MAX_SCANS = 100  # of a JPEG, which usually has ten; each costs a pass over all pixels, and a few bytes in the file


class UnreadableImage(DataError):
    """A picture that cannot be decoded. The message is about "it", so that the name of the file can go before."""


class _Jpeg(JpegImageFile):
    """A JPEG of which the EXIF block is not searched for a resolution: damage there would only give a warning."""

    def _read_dpi_from_exif(self) -> None:
        pass


def _heic(file: BinaryIO) -> ImageFile.ImageFile:
    """pillow-heif's decoder. It is not registered with Pillow, so `Image.open` does not change for anyone else."""
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
REMEDIES = {"ZIP": "unpack", "gzip": "unpack", "that of a video": "take pictures from"}  # for the rest: convert

# (where, the bytes that are there, what the file then is); the first that fits counts
SIGNATURES = (
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (8, b"WEBP", "WebP"),
    (0, b"BM", "BMP"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (0, b"II*\0", "TIFF or a camera's raw one"),
    (0, b"MM\0*", "TIFF or a camera's raw one"),
    (0, b"8BPS", "Photoshop"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"%PDF", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"\xc5\xd0\xd3\xc6", "PostScript"),
    (4, b"ftypavi", "AVIF"),
    (4, b"ftyphe", "HEIC"),
    (4, b"ftypmi", "HEIC"),
    (4, b"ftypmsf1", "HEIC"),
    (4, b"ftyp", "that of a video"),
    (4, b"jP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (4, b"JXL ", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"PK\3\4", "ZIP"),
    (0, b"\x1f\x8b", "gzip"),
    *((0, b"P%d%c" % (number, space), "PPM") for number in range(1, 7) for space in b"\n\r\t "),
)

# EXIF's eight orientations: what turns the stored picture into the one that was seen; 1 needs nothing.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
ORIENTATION = 0x0112  # EXIF's tag
EXIF_AS_TEXT = "Raw profile type exif"  # what ImageMagick calls a text of a PNG
INTEGERS = {1: "B", 3: "H", 4: "I"}  # EXIF's types of whole numbers

Fit = Literal["middle", "stretch"]  # how a picture becomes a square: the middle of its longer side, or all, squeezed

JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # those that a length follows, and the end
SCAN, JPEG_END = b"\xff\xda", b"\xff\xd9"
ANIMATION = (b"acTL", b"fcTL", b"fdAT")  # a PNG's chunks that programs which know no animation pass over
FRAME, EXTENSION = b",!"  # what a GIF's blocks begin with


def decode(
    source: str | os.PathLike[str] | bytes, *, size: int | None = None, fit: Fit = "middle", limit: int = LIMIT
) -> Tensor:
    """The picture of a file, or of the bytes of one, upright and in colour: uint8 (h, w, 3).

    With `size`, the square that a network takes: the shorter side scaled to `size` and the middle of the longer one or,
    to "stretch", both sides scaled to it. Of a moving picture, the first frame. More than `limit` pixels are refused
    before any is decoded.
    """
    if size is not None:
        check_side(size)
    content = source if isinstance(source, bytes) else content_of(source)
    kind = _kind(content)
    try:
        image = _opened(kind, content, limit)
        extent = _draft(image, size)
        image.load()  # before the EXIF block is asked for: a PNG may have it after the pixels
        if kind == "PNG":
            _widen_transparency(image, bits=content[24])
        seen = _in_colour(image, kind)
        if size is not None:
            seen = _square(seen, size, extent, fit)
        seen = _on_white(seen)
        orientation = _orientation(_exif(image.info))
        if orientation in TURNS:
            seen = seen.transpose(TURNS[orientation])
        return torch.from_numpy(np.array(seen))
    except UnreadableImage:
        raise
    except MemoryError as error:
        raise UnreadableImage("There is not enough memory to decode it. Make it smaller.") from error
    except Exception as error:  # what decoders raise over damaged files is not limited to any list
        raise UnreadableImage(
            f"It begins like a {kind}, but is damaged, cut short, or carries more metadata than a picture needs. "
            "Copy or save it again."
        ) from error


def extent(source: str | os.PathLike[str] | bytes, *, limit: int = LIMIT) -> tuple[int, int]:
    """(width, height) in pixels, from the header alone: as stored, or for HEIC as rotated."""
    content = source if isinstance(source, bytes) else content_of(source)
    kind = _kind(content)
    try:
        return _opened(kind, content, limit).size
    except UnreadableImage:
        raise
    except Exception as error:
        raise UnreadableImage(f"It begins like a {kind}, but is damaged. Copy or save it again.") from error


def check_side(size: int) -> None:
    """Refuse what cannot be the side of an image."""
    if size < 1:
        raise UsageError(f"The side of an image must be at least 1 pixel; found {size}.")


def content_of(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a picture's file, or why they cannot be had."""
    if not os.path.isfile(path):  # a pipe or a device could be read for ever
        raise UnreadableImage("It is not a file." if os.path.exists(path) else "There is no such file.")
    try:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            if length > MAX_BYTES:
                raise UnreadableImage(
                    f"It has {length:,} bytes, more than any picture of at most {LIMIT:,} pixels. Make it smaller."
                )
            return file.read()
    except OSError as error:
        raise UnreadableImage(f"It cannot be opened: {error.strerror}.") from error


def _kind(content: bytes) -> str:
    """Which of `DECODERS` the bytes are for; for all else, an error that says what they seem to be."""
    for start, signature, name in SIGNATURES:
        if content[start : start + len(signature)] == signature:
            if name in DECODERS:
                return name
            raise UnreadableImage(f"Its format is {name}, and {READ}: {REMEDIES.get(name, 'convert')} it.")
    raise UnreadableImage(_unrecognised(content))


def _unrecognised(content: bytes) -> str:
    if not content:
        return "It is empty. Copy it again."
    if not content.strip(b"\0"):
        return "It holds nothing but zero bytes, as after an interrupted copy. Copy it again."
    text = _text(content[:1024])
    if text is None:
        return f"It is of no known format: it begins with the bytes {content[:8].hex(' ')}, and {READ}."
    if text.startswith("version https://git-lfs"):
        return "It is the pointer that Git LFS leaves in place of a picture. Run 'git lfs pull'."
    if "<svg" in text:
        return f"Its format is SVG, and {READ}: convert it."
    if "<html" in text or "<!doctype html" in text:
        return "It is a web page, as a server sends in place of a picture it does not have. Download it again."
    return f"It is text and no picture; {READ}."


def _text(beginning: bytes) -> str | None:
    """The bytes as small letters, or None if they are not UTF-8 that a person wrote."""
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(beginning)  # the last letter may be cut
    except UnicodeDecodeError:
        return None
    return text.lower() if all(letter.isprintable() or letter.isspace() for letter in text) else None


def _opened(kind: str, content: bytes, limit: int) -> ImageFile.ImageFile:
    """The image with its header read, no pixel decoded, and of an acceptable size."""
    if kind == "HEIC":
        content = _one_image(content, limit)
    if kind == "PNG":
        content = _still(content)
    if kind in ("WebP", "GIF"):  # their decoders take memory for all pixels as soon as they are made
        _check_size(_webp_size(content) if kind == "WebP" else _gif_size(content), limit)
    image = DECODERS[kind](io.BytesIO(content))
    _check_size(image.size, limit)
    if kind == "JPEG" and (scans := _scans(content)) > MAX_SCANS:
        raise UnreadableImage(f"It is a JPEG in {scans:,} scans; a picture has about ten. Save it again.")
    return image


def _check_size(size: tuple[int, int], limit: int) -> None:
    width, height = size
    if width * height > limit:
        raise UnreadableImage(
            f"It is {width:,} x {height:,} pixels; at most {limit:,} in all are decoded. Make it smaller."
        )
    if max(size) > MAX_SIDE:
        raise UnreadableImage(
            f"It is {width:,} x {height:,} pixels; sides of at most {MAX_SIDE:,} are decoded. Make it smaller."
        )


def _one_image(content: bytes, limit: int) -> bytes:
    """A HEIC file reduced to its primary image, if that has an acceptable number of pixels.

    It has no EXIF block any more: libheif rotates the image by its properties, and EXIF would rotate it again.
    """
    try:
        reduced = heif.primary_image(content)
    except heif.Unsupported as error:
        name = "AVIF" if error.kind == "av01" else f"HEIF with '{error.kind}'"
        raise UnreadableImage(f"Its format is {name}, and {READ}: convert it.") from error
    _check_size(reduced.size, limit)
    if reduced.pixels > MAX_HEIC_PIXELS * limit:
        raise UnreadableImage(
            f"It is a HEIC whose tiles have {reduced.pixels:,} pixels in all, many more than the image. Save it again."
        )
    return reduced.content


def _still(content: bytes) -> bytes:
    """A PNG without the chunks that make it move, each of the others verified: Pillow does not verify the pixels'."""
    parts = [content[:8]]
    name, place = b"", 8
    while name != b"IEND":
        length, name = struct.unpack_from(">I4s", content, place)
        end = place + 8 + length
        (checksum,) = struct.unpack_from(">I", content, end)
        if zlib.crc32(content[place + 4 : end]) != checksum:
            raise ValueError
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
    """(width, height) of a GIF, or of its first frame where that reaches further."""
    width, height, flags = struct.unpack_from("<HHB", content, 6)
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)  # after the colours
    while content[place] != FRAME:
        if content[place] == EXTENSION:
            place += 2
            while content[place]:
                place += 1 + content[place]
        place += 1
    left, top, across, down = struct.unpack_from("<4H", content, place + 1)
    return max(width, left + across), max(height, top + down)


def _scans(content: bytes) -> int:
    """How many passes over its pixels a JPEG asks for, up to its end, without which half a picture may be decoded."""
    scans = 0
    marker = JPEG_MARKER.search(content)
    while marker and marker[0] != JPEG_END:
        scans += marker[0] == SCAN
        length = int.from_bytes(content[marker.end() : marker.end() + 2])
        marker = JPEG_MARKER.search(content, marker.end() + length)
    if marker is None:
        raise EOFError
    return scans


def _draft(image: ImageFile.ImageFile, size: int | None) -> tuple[float, float]:
    """Let a JPEG be decoded at 1/2, 1/4 or 1/8 where that is still twice `size`; (width, height) it will then cover."""
    if size is not None and (drafted := image.draft(None, (2 * size, 2 * size))):
        _, (_, _, width, height) = drafted
        return width, height  # not whole numbers: the last row and column of pixels may stand for less than the others
    return image.size


def _widen_transparency(image: Image.Image, bits: int) -> None:
    """Make the colour that a PNG says is transparent one of its pixels'. Pillow brings these alone to eight bits."""
    colour = image.info.get("transparency")
    if image.mode == "L" and isinstance(colour, int) and bits < 8:
        image.info["transparency"] = colour * 255 // (2**bits - 1)
    elif image.mode == "RGB" and isinstance(colour, tuple) and bits == 16:
        image.info["transparency"] = tuple(value >> 8 for value in colour)


def _in_colour(image: Image.Image, kind: str) -> Image.Image:
    """In RGB, or in RGBA where parts of it may be transparent."""
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would cut off at 255
        grey = np.asarray(image).astype(np.uint32)
        grey[grey == image.info.get("transparency")] = 0xFFFF
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    mode = "RGBA" if image.has_transparency_data else "RGB"
    image = image if image.mode == mode else image.convert(mode)
    if kind == "BMP" and mode == "RGBA" and image.getchannel("A").getextrema() == (0, 0):
        return image.convert("RGB")  # many programs leave zeros in the fourth byte, and mean nothing by it
    return image


def _on_white(image: Image.Image) -> Image.Image:
    """In RGB. What is transparent becomes white, the paper that drawings and cut-outs are made to be seen on."""
    if image.mode == "RGB":
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _square(image: Image.Image, size: int, extent: tuple[float, float], fit: Fit) -> Image.Image:
    width, height = extent
    if fit == "stretch":
        return image.resize((size, size), Image.Resampling.BICUBIC, (0, 0, width, height))
    side = min(extent)
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BICUBIC, box)


def _exif(information: Mapping[Any, object]) -> object:
    """The EXIF block, also where a PNG has it as ImageMagick writes it: a text of a name, a length, and digits.

    Pillow limits what a text may swell to.
    """
    text = information.get(EXIF_AS_TEXT)
    if "exif" in information or not isinstance(text, str):
        return information.get("exif")
    try:
        return bytes.fromhex("".join(text.split("\n")[3:]))
    except ValueError:  # damaged
        return None


def _orientation(exif: object) -> int:
    """EXIF's orientation, 1 to 8; 1 where the block has none or is damaged: a picture is more than its metadata."""
    if not isinstance(exif, bytes):  # none, or a text that a PNG has under this name
        return 1
    block = exif.removeprefix(b"Exif\0\0")
    order = "<" if block.startswith(b"II") else ">"
    try:
        (start,) = struct.unpack_from(order + "I", block, 4)
        (entries,) = struct.unpack_from(order + "H", block, start)
        for place in range(start + 2, start + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(order + "HH", block, place)
            if tag == ORIENTATION and kind in INTEGERS:
                return int(struct.unpack_from(order + INTEGERS[kind], block, place + 8)[0])
    except struct.error:
        pass
    return 1
