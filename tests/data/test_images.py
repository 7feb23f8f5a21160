"""Every image file is decoded to the pixels that people see, or refused with a reason."""

from __future__ import annotations

import io
import os
import struct
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from images_made import (
    Pixels,
    bmp_32,
    chunk,
    encoded,
    exif,
    gradient,
    grey_16,
    on_white,
    png,
    scans,
    several_frames,
    ycck,
)
from PIL import Image, ImageFile, ImageOps

from engram.data import images
from engram.data.images import UnreadableImage, decode
from engram.errors import DataError, UsageError

GRADIENT = gradient()
ROWS = b"".join(b"\0" + row.tobytes() for row in GRADIENT)  # as PNG stores it
REAL = {
    "JPEG": encoded(GRADIENT, "JPEG"),
    "progressive JPEG": encoded(GRADIENT, "JPEG", progressive=True),
    "CMYK JPEG": encoded(Image.fromarray(GRADIENT).convert("CMYK"), "JPEG"),
    "turned JPEG": encoded(GRADIENT, "JPEG", exif=exif(6)),
    "PNG": encoded(GRADIENT, "PNG"),
    "APNG": several_frames("PNG"),
    "16-bit PNG": grey_16(np.arange(0, 65536, 3000, dtype=np.uint16)),
    "WebP": encoded(GRADIENT, "WEBP"),
    "lossless WebP": encoded(GRADIENT, "WEBP", lossless=True),
    "animated WebP": several_frames("WEBP"),
    "BMP": encoded(GRADIENT, "BMP"),
    "palette BMP": encoded(Image.fromarray(GRADIENT).quantize(64), "BMP"),
    "GIF": encoded(Image.fromarray(GRADIENT).quantize(64), "GIF"),
    "animated GIF": several_frames("GIF"),
}


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    """No warning of Pillow reaches the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def pixels(source: Any, **options: Any) -> Pixels:
    tensor = decode(source, **options)
    assert tensor.dtype == torch.uint8
    assert tensor.ndim == 3 and tensor.shape[2] == 3
    assert tensor.is_contiguous()
    array: Pixels = tensor.numpy()
    return array


def distance(one: Pixels, other: Pixels) -> float:
    """The largest difference between two images."""
    assert one.shape == other.shape
    return float(np.abs(one.astype(float) - other).max())


# Formats


@pytest.mark.parametrize(
    ("format", "options", "tolerance"),
    [("PNG", {}, 0), ("BMP", {}, 0), ("WEBP", {"lossless": True}, 0), ("WEBP", {"quality": 95}, 16)]
    + [("JPEG", {"quality": 98, "subsampling": 0, "progressive": progressive}, 4) for progressive in (False, True)],
)
def test_every_lossless_format_keeps_its_pixels(format: str, options: dict[str, Any], tolerance: int) -> None:
    assert distance(pixels(encoded(GRADIENT, format, **options)), GRADIENT) <= tolerance


def test_a_gif_gives_its_colours() -> None:
    image = Image.fromarray(GRADIENT).quantize(64)
    assert np.array_equal(pixels(encoded(image, "GIF")), np.array(image.convert("RGB")))


def test_a_path_gives_the_same_as_its_bytes_whatever_its_name(tmp_path: Path) -> None:
    for number, (name, content) in enumerate(REAL.items()):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(content)
        assert np.array_equal(pixels(path), pixels(content)), name
        assert np.array_equal(pixels(str(path)), pixels(content)), name


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_an_animation_gives_its_first_frame(format: str) -> None:
    content = several_frames(format, **({"lossless": True} if format == "WEBP" else {}))
    with Image.open(io.BytesIO(content)) as image:
        assert getattr(image, "n_frames", 1) == 2
    assert distance(pixels(content), GRADIENT) <= (40 if format == "GIF" else 0)  # its 64 colours are coarse


def test_a_jpeg_that_holds_several_images_gives_the_first() -> None:
    content = encoded(GRADIENT, "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))], quality=98)
    with Image.open(io.BytesIO(content)) as image:
        assert image.format == "MPO"
    assert distance(pixels(content), GRADIENT) <= 12


def test_a_first_frame_smaller_than_its_gif_is_composited_on_white() -> None:
    palette = bytes([255, 0, 0, 0, 0, 255])
    frame = b"\x21\xf9\4\1\0\0\1\0" + b"," + struct.pack("<HHHHB", 1, 0, 1, 1, 0) + b"\2\2\x44\1\0;"
    content = b"GIF89a" + struct.pack("<HHBBB", 3, 1, 0x80, 0, 0) + palette + frame
    assert pixels(content).tolist() == [[[255] * 3, [255, 0, 0], [255] * 3]]


# Modes


def test_grey_images_have_three_equal_channels() -> None:
    grey = GRADIENT[..., 0]
    assert np.array_equal(pixels(encoded(grey, "PNG")), np.stack([grey] * 3, -1))
    assert distance(pixels(encoded(grey, "JPEG", quality=98)), np.stack([grey] * 3, -1)) <= 3


@pytest.mark.parametrize("format", ["PNG", "BMP", "GIF"])
def test_one_bit_images_are_black_and_white(format: str) -> None:
    image = Image.fromarray(GRADIENT).convert("1")
    expected = np.array(image.convert("L"))
    assert set(expected.ravel().tolist()) == {0, 255}
    assert np.array_equal(pixels(encoded(image, format)), np.stack([expected] * 3, -1))


@pytest.mark.parametrize("depth", [2, 4])
def test_grey_of_few_bits_spans_black_to_white(depth: int) -> None:
    levels = 2**depth
    bits = "".join(f"{level:0{depth}b}" for level in range(levels))
    content = png(levels, 1, depth, 0, b"\0" + int(bits, 2).to_bytes(len(bits) // 8))
    assert pixels(content)[0, :, 0].tolist() == [level * 255 // (levels - 1) for level in range(levels)]


def test_sixteen_bits_of_grey_are_divided_by_257() -> None:
    values = np.arange(65536, dtype=np.uint16)
    found = pixels(grey_16(values))
    assert np.array_equal(found[0, :, 0], np.rint(values / 257))
    assert np.array_equal(found, np.repeat(found[..., :1], 3, axis=-1))
    assert pixels(grey_16(np.arange(256, dtype=np.uint16) * 257))[0, :, 0].tolist() == [*range(256)]


def test_a_transparent_value_of_sixteen_bits_is_white() -> None:
    values = np.array([0, 1799, 1800, 65535], np.uint16)
    assert pixels(grey_16(values, chunk(b"tRNS", struct.pack(">H", 1799))))[0, :, 0].tolist() == [0, 255, 7, 255]


def test_sixteen_bits_of_colour_become_eight() -> None:
    values = np.arange(0, 65536, 5, dtype=np.uint16)
    values = values[: len(values) // 3 * 3]
    found = pixels(png(len(values) // 3, 1, 16, 2, b"\0" + values.astype(">u2").tobytes()))
    assert np.abs(found.ravel() - values / 257).max() <= 1
    opacity = np.array([[0, 0], [1799, 65535], [65535, 65535], [0, 32896]], ">u2")
    assert pixels(png(4, 1, 16, 4, b"\0" + opacity.tobytes()))[0, :, 0].tolist() == [255, 7, 255, 127]


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_transparency_is_composited_on_white(format: str) -> None:
    opacity = np.tile(np.linspace(0, 255, 32).astype(np.uint8), (24, 1))
    content = encoded(np.dstack([GRADIENT, opacity]), format, **({"lossless": True} if format == "WEBP" else {}))
    found = pixels(content)
    assert distance(found, on_white(GRADIENT, opacity)) <= 1
    assert (found[:, 0] == 255).all()
    assert np.array_equal(found[:, -1], GRADIENT[:, -1])


def test_grey_with_alpha_is_composited_on_white() -> None:
    opacity = np.tile(np.linspace(0, 255, 32).astype(np.uint8), (24, 1))
    content = encoded(Image.merge("LA", [Image.fromarray(GRADIENT[..., 1]), Image.fromarray(opacity)]), "PNG")
    assert distance(pixels(content), on_white(np.stack([GRADIENT[..., 1]] * 3, -1), opacity)) <= 1


COLOURS = np.array([[200, 10, 20], [30, 180, 40], [50, 60, 160], [70, 80, 90]], np.uint8)


@pytest.mark.parametrize(
    ("opacity", "expected"),
    [
        (b"", [255, 255, 255, 255]),
        (b"\xff\0", [255, 0, 255, 255]),
        (b"\0\x80\xff", [0, 128, 255, 255]),
    ],
    ids=["none", "one colour", "by degrees"],
)
def test_the_colours_of_a_palette_may_be_transparent(opacity: bytes, expected: list[int]) -> None:
    transparency = chunk(b"tRNS", opacity) if opacity else b""
    content = png(4, 1, 2, 3, b"\0\x1b", chunk(b"PLTE", COLOURS.tobytes()) + transparency)
    assert distance(pixels(content), on_white(COLOURS[None], np.array([expected], np.uint8))) <= 1


def test_one_colour_may_stand_for_transparent() -> None:
    content = png(4, 1, 8, 2, b"\0" + COLOURS.tobytes(), chunk(b"tRNS", struct.pack(">3H", *COLOURS[2])))
    assert np.array_equal(pixels(content)[0], [*COLOURS[:2], [255] * 3, COLOURS[3]])


@pytest.mark.parametrize(("bits", "row"), [(2, b"\0\x1b"), (4, b"\0\x05\xaf")])
def test_a_grey_of_few_bits_may_stand_for_transparent(bits: int, row: bytes) -> None:
    content = png(4, 1, bits, 0, row, chunk(b"tRNS", struct.pack(">H", 2**bits // 3)))  # one in three, as is the second
    assert pixels(content)[0, :, 0].tolist() == [0, 255, 170, 255]


def test_a_colour_of_sixteen_bits_may_stand_for_transparent() -> None:
    rows = b"\0" + struct.pack(">6H", 0x1234, 0x8000, 0xFFFF, 0x4321, 0x8000, 0xFFFF)
    content = png(2, 1, 16, 2, rows, chunk(b"tRNS", struct.pack(">3H", 0x1234, 0x8000, 0xFFFF)))
    assert pixels(content)[0].tolist() == [[255] * 3, [0x43, 0x80, 0xFF]]


def test_an_image_of_millions_of_rows_is_refused_before_any_is_decoded() -> None:
    with pytest.raises(UnreadableImage, match=r"1 x 1,000,000 .*100,000"):
        pixels(png(1, 1_000_000, 8, 0, b""))


def test_the_transparent_colour_of_a_gif_is_white() -> None:
    image = Image.fromarray(np.array([[0, 1, 2, 3]], np.uint8)).convert("P")
    image.putpalette(COLOURS.tobytes())
    assert np.array_equal(pixels(encoded(image, "GIF", transparency=1))[0], [COLOURS[0], [255] * 3, *COLOURS[2:]])


def test_cmyk_is_converted_to_rgb() -> None:
    inks = {(0, 0, 0, 0): (255, 255, 255), (255, 0, 0, 0): (0, 255, 255), (0, 255, 0, 0): (255, 0, 255)}
    inks |= {(0, 0, 255, 0): (255, 255, 0), (0, 0, 0, 255): (0, 0, 0), (0, 128, 255, 64): (191, 95, 0)}
    for ink, colour in inks.items():
        found = pixels(encoded(Image.new("CMYK", (8, 8), ink), "JPEG", quality=100))
        assert distance(found, np.full((8, 8, 3), colour, np.uint8)) <= 2, ink


def test_ycck_gives_its_colours() -> None:
    content = ycck(GRADIENT)
    with Image.open(io.BytesIO(content)) as image:
        assert (image.mode, image.info["adobe_transform"]) == ("CMYK", 2)
    assert distance(pixels(content), GRADIENT) <= 6


def test_the_alpha_of_a_bmp_counts_unless_it_is_all_zero() -> None:
    opacity = np.tile(np.linspace(0, 255, 32).astype(np.uint8), (24, 1))
    assert distance(pixels(bmp_32(np.dstack([GRADIENT, opacity]))), on_white(GRADIENT, opacity)) <= 1
    assert np.array_equal(pixels(bmp_32(np.dstack([GRADIENT, 0 * opacity]))), GRADIENT)
    assert (pixels(encoded(np.dstack([GRADIENT, 0 * opacity]), "PNG")) == 255).all()


def test_a_bmp_may_be_stored_from_the_top() -> None:
    content = bytearray(encoded(GRADIENT[::-1].copy(), "BMP"))
    struct.pack_into("<i", content, 22, -len(GRADIENT))
    assert np.array_equal(pixels(bytes(content)), GRADIENT)


# Orientation

UPRIGHT: dict[int, Callable[[Pixels], Pixels]] = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored[::-1, ::-1].swapaxes(0, 1),
    8: lambda stored: np.rot90(stored),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("format", ["PNG", "WEBP", "JPEG"])
def test_images_are_rotated_upright(orientation: int, format: str) -> None:
    options = {"PNG": {}, "WEBP": {"lossless": True}, "JPEG": {"quality": 98, "subsampling": 0}}[format]
    content = encoded(GRADIENT, format, exif=exif(orientation), **options)
    expected = UPRIGHT[orientation](GRADIENT)
    assert distance(pixels(content), expected) <= (4 if format == "JPEG" else 0)
    square = UPRIGHT[orientation](pixels(encoded(GRADIENT, format, **options), size=9))
    assert distance(pixels(content, size=9), square) == 0


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_the_orientation_is_read_in_every_encoding(order: str, kind: int) -> None:
    assert pixels(encoded(GRADIENT, "PNG", exif=exif(8, order, kind))).shape == (32, 24, 3)


def test_the_orientation_of_a_png_may_come_after_its_pixels() -> None:
    content = png(32, 24, 8, 2, ROWS, after=chunk(b"eXIf", exif(6).removeprefix(b"Exif\0\0")))
    assert np.array_equal(pixels(content), UPRIGHT[6](GRADIENT))


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_invalid_orientation_is_ignored(orientation: int) -> None:
    assert np.array_equal(pixels(encoded(GRADIENT, "PNG", exif=exif(orientation))), GRADIENT)


def as_text(block: bytes) -> bytes:
    """An EXIF block as ImageMagick writes it into a PNG: as a text with its type, its length and hexadecimal lines."""
    digits = block.hex()
    lines = "\n".join(digits[start : start + 72] for start in range(0, len(digits), 72))
    return b"Raw profile type exif\0" + f"\nexif\n{len(block):8}\n{lines}\n".encode()


def test_the_orientation_of_a_png_may_be_in_a_text_as_imagemagick_writes_it() -> None:
    name, _, text = as_text(exif(6)).partition(b"\0")
    for profile in (chunk(b"tEXt", as_text(exif(6))), chunk(b"zTXt", name + b"\0\0" + zlib.compress(text))):
        content = png(32, 24, 8, 2, ROWS, before=profile)
        upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
        assert np.array_equal(pixels(content), upright) and upright.shape == (32, 24, 3)
    both = png(32, 24, 8, 2, ROWS, before=chunk(b"tEXt", as_text(exif(6))) + chunk(b"eXIf", exif(1)[6:]))
    assert np.array_equal(pixels(both), GRADIENT)  # what PNG has a chunk for counts more
    for damaged in (b"Raw profile type exif\0", as_text(exif(6))[:-40] + b"xyz", as_text(b"")):
        assert np.array_equal(pixels(png(32, 24, 8, 2, ROWS, before=chunk(b"tEXt", damaged))), GRADIENT)


def test_damaged_exif_only_loses_the_orientation() -> None:
    whole = exif(6)
    noise = np.random.default_rng(0)
    blocks = [whole[:length] for length in range(6, len(whole))]
    blocks += [b"Exif\0\0" + noise.bytes(40) for _ in range(40)]
    blocks += [b"Exif\0\0II*\0" + struct.pack("<IH", 8, 200) + noise.bytes(100) for _ in range(40)]
    blocks += [b"Exif\0\0MM\0*" + struct.pack(">IHHHII", 8, 1, 0x011A, 5, 1, 0xFFFFFFF0)]
    plain = REAL["JPEG"]
    for block in blocks:
        segment = b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block
        for content in (plain[:2] + segment + plain[2:], plain[:2] + segment + plain[20:]):  # with JFIF and without
            assert np.array_equal(np.sort(pixels(content), axis=None), np.sort(pixels(plain), axis=None)), block


def test_a_text_chunk_named_exif_is_ignored() -> None:
    for text in (chunk(b"tEXt", b"exif\0none"), chunk(b"zTXt", b"exif\0\0" + zlib.compress(b"none"))):
        assert np.array_equal(pixels(png(32, 24, 8, 2, ROWS, before=text)), GRADIENT)


def test_a_wrong_animation_header_does_not_change_the_image() -> None:
    for announced in (chunk(b"acTL", bytes(8)), chunk(b"acTL", bytes(3)), chunk(b"fcTL", bytes(26)) * 2):
        assert np.array_equal(pixels(png(32, 24, 8, 2, ROWS, before=announced)), GRADIENT)


# Squares


def reference(image: Pixels, size: int) -> Pixels:
    """The shorter side scaled to `size`, then cropped to the middle: in two steps, at integer pixels."""
    height, width, _ = image.shape
    scale = size / min(height, width)
    scaled = Image.fromarray(image).resize((round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)
    left, top = (scaled.width - size) // 2, (scaled.height - size) // 2
    return np.array(scaled.crop((left, top, left + size, top + size)))


def test_a_square_is_the_middle_of_the_scaled_image() -> None:
    noise = np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    assert distance(pixels(encoded(noise, "PNG"), size=12), reference(noise, 12)) <= 1
    upright = noise.swapaxes(0, 1).copy()
    assert distance(pixels(encoded(upright, "PNG"), size=12), reference(upright, 12)) <= 1
    assert np.array_equal(pixels(encoded(noise, "PNG"), size=48), noise[:, 8:56])
    assert distance(pixels(encoded(noise, "PNG"), size=96), reference(noise, 96)) <= 1


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (2, 3), (5, 5), (7, 4000), (31, 33)])
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_any_shape_becomes_a_square(shape: tuple[int, int], format: str) -> None:
    content = encoded(np.full((*shape, 3), (10, 130, 250), np.uint8), format, quality=100)
    for size in (1, 5, 32):
        assert distance(pixels(content, size=size), np.full((size, size, 3), (10, 130, 250), np.uint8)) <= 3


def test_transparent_pixels_do_not_bleed_into_their_neighbours() -> None:
    image = np.zeros((8, 8, 4), np.uint8)
    image[:, :4] = 200, 0, 0, 255  # red beside a black that is not seen
    found = pixels(encoded(image, "PNG"), size=4)
    assert distance(found[:, 0], np.full((4, 3), (200, 0, 0))) <= 6
    assert distance(found[:, 3], np.full((4, 3), 255)) <= 6
    white = encoded(pixels(encoded(image, "PNG")), "PNG")
    assert distance(found, pixels(white, size=4)) <= 6


def test_without_a_size_an_image_keeps_its_own() -> None:
    assert pixels(encoded(gradient(1, 1), "PNG")).shape == (1, 1, 3)
    assert pixels(encoded(gradient(7, 300), "PNG")).shape == (7, 300, 3)


@pytest.mark.parametrize("shape", [(600, 800), (803, 597), (1201, 613)])
def test_a_large_jpeg_is_decoded_at_a_fraction_and_looks_the_same(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    y, x = np.mgrid[0 : shape[0], 0 : shape[1]]
    waves = 127 + 60 * np.sin(x / 9) + 60 * np.cos(y / 14)
    image = (waves[..., None] * (1, 0.8, 0.5)).astype(np.uint8)
    content = encoded(image, "JPEG", quality=95)
    whole = pixels(content)
    decoded = []
    in_colour = images._in_colour
    monkeypatch.setattr(images, "_in_colour", lambda image, kind: decoded.append(image.size) or in_colour(image, kind))
    found = pixels(content, size=64)
    assert decoded == [(-(-shape[1] // 4), -(-shape[0] // 4))]
    expected = pixels(encoded(whole, "PNG"), size=64)
    assert distance(found, expected) <= 6
    assert np.abs(found.astype(float) - expected).mean() < 1


@pytest.mark.parametrize("size", [0, -3])
def test_a_square_without_pixels_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match=f" {size}"):
        decode(REAL["PNG"], size=size)


# Too large


def webp(kind: bytes, header: bytes) -> bytes:
    body = b"WEBP" + kind + struct.pack("<I", len(header)) + header
    return b"RIFF" + struct.pack("<I", len(body)) + body


def resized_jpeg(width: int, height: int) -> bytes:
    content = bytearray(REAL["JPEG"])
    struct.pack_into(">HH", content, content.index(b"\xff\xc0") + 5, height, width)
    return bytes(content)


BOMBS = {
    "PNG": (png(2**31 - 1, 2**31 - 1, 8, 6, b""), "2,147,483,647 x 2,147,483,647"),
    "tall PNG": (png(1, 64_000_001, 1, 0, b""), "1 x 64,000,001"),
    "PNG below Pillow's error": (png(12_000, 12_000, 8, 2, b""), "12,000 x 12,000"),
    "JPEG": (resized_jpeg(65_500, 65_500), "65,500 x 65,500"),
    "BMP": (
        b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 30_000, 30_000, 1, 24, *[0] * 6),
        "30,000 x 30,000",
    ),
    "GIF": (b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0) + b"," + bytes(9), "65,535 x 65,535"),
    "lossy WebP": (webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 16_383, 16_383)), "16,383 x 16,383"),
    "lossless WebP": (webp(b"VP8L", b"\x2f" + b"\xff\xff\xff\x0f"), "16,384 x 16,384"),
    "extended WebP": (webp(b"VP8X", bytes(4) + b"\xff\xff\0" * 2), "65,536 x 65,536"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_header_that_declares_too_many_pixels_is_refused_before_decoding(name: str) -> None:
    content, size = BOMBS[name]
    with pytest.raises(UnreadableImage, match=rf"{size} .*64,000,000"):
        decode(content)


def test_a_gif_with_a_frame_larger_than_declared_is_refused() -> None:
    cleared = b"!\xf9\4\x08\0\0\0\0"  # an area that is to be cleared later, for which Pillow takes memory at once
    frame = b"," + struct.pack("<HHHHB", 0, 0, 12_000, 12_000, 0) + b"\2\2\x44\1\0;"
    for flags, palette in ((0, b""), (0x80, bytes(6))):
        header = b"GIF89a" + struct.pack("<HHBBB", 3, 1, flags, 0, 0) + palette
        with pytest.raises(UnreadableImage, match="12,000 x 12,000"):
            decode(header + b"!\xfe\3abc\0" + cleared + frame)


@pytest.mark.parametrize("name", [name for name in REAL if name not in ("16-bit PNG", "turned JPEG")])
def test_the_limit_is_of_pixels_and_may_be_reached(name: str) -> None:
    assert pixels(REAL[name], limit=24 * 32).shape == (24, 32, 3)
    with pytest.raises(UnreadableImage, match=r"32 x 24 .*767"):
        decode(REAL[name], limit=24 * 32 - 1)
    with pytest.raises(UnreadableImage, match="767"):
        decode(REAL[name], limit=24 * 32 - 1, size=4)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "BMP"])
def test_pillows_own_limit_does_not_apply(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert pixels(REAL[name]).shape == (24, 32, 3)
    assert Image.MAX_IMAGE_PIXELS == 100


@pytest.mark.parametrize("size", [(0, 24), (32, 0), (0, 0)])
def test_an_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    for content in (png(*size, 8, 2, b""), resized_jpeg(*size)):
        with pytest.raises(UnreadableImage, match="damaged"):
            decode(content)


DEFLATED_ZEROS = zlib.compress(bytes(20_000_000), 9)


@pytest.mark.parametrize(
    "metadata",
    [
        chunk(b"zTXt", b"Comment\0\0" + DEFLATED_ZEROS),
        chunk(b"iTXt", b"Comment\0\1\0\0\0" + DEFLATED_ZEROS),
        chunk(b"iCCP", b"profile\0\0" + DEFLATED_ZEROS),
        chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(1_000_000))) * 70,
    ],
    ids=["text", "international text", "colour profile", "many texts"],
)
def test_metadata_that_decompresses_to_much_is_refused(metadata: bytes) -> None:
    for place in ({"before": metadata}, {"after": metadata}):
        if b"iCCP" in metadata and "after" in place:
            continue  # a profile has its place before the pixels
        with pytest.raises(UnreadableImage, match=r"PNG.*damaged"):
            decode(png(32, 24, 8, 2, ROWS, **place))


def test_a_jpeg_of_a_thousand_scans_is_refused_and_one_of_few_is_read() -> None:
    content = REAL["progressive JPEG"]
    assert np.array_equal(pixels(scans(content, 20)), pixels(content))
    trailer = content + b"\xff\xda\0\2" * 1000  # after the end: what a phone appends to a photo
    assert np.array_equal(pixels(trailer), pixels(content))
    with pytest.raises(UnreadableImage, match=r"1,0\d\d scans"):
        decode(scans(content, 1000))


# Damaged


@pytest.mark.parametrize("name", REAL)
def test_a_truncated_image_is_refused_unless_no_pixel_is_missing(name: str) -> None:
    content = REAL[name]
    expected = pixels(content)
    lengths = [*range(0, len(content) - 40, max(len(content) // 60, 1)), *range(len(content) - 40, len(content))]
    refused = 0
    for length in lengths:
        for options in ({}, {"size": 4}):
            try:
                found = pixels(content[:length], **options)
            except UnreadableImage:
                refused += 1
            else:
                assert np.array_equal(found, expected if not options else pixels(content, size=4)), length
    # A last checksum, a GIF's last two bytes, and the other frames of a animation are not needed for the first.
    assert refused >= 2 * (len(lengths) - 4) or name == "animated GIF"
    assert refused >= len(lengths) // 2


def test_a_png_with_a_hole_is_refused() -> None:
    noise = np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = encoded(noise, "PNG", compress_level=0)
    for hole in (slice(5000, 5001), slice(5000, 6000), slice(-100, -20)):
        damaged = bytearray(content)
        damaged[hole] = bytes(len(damaged[hole]))
        with pytest.raises(UnreadableImage, match=r"PNG.*damaged"):
            decode(bytes(damaged))


def test_a_png_whose_checksum_does_not_fit_its_pixels_is_refused() -> None:
    one, other = (png(4, 1, 8, 2, b"\0" + row.tobytes()) for row in (COLOURS, COLOURS[::-1]))
    end = len(one) - 12
    assert len(one) == len(other)
    with pytest.raises(UnreadableImage, match=r"PNG.*damaged"):
        decode(one[: end - 4] + other[end - 4 :])


def test_markers_in_the_metadata_of_a_jpeg_are_ignored() -> None:
    noise = np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = encoded(noise, "JPEG")
    for comment in (b"\xff\xd9" * 3, b"\xff\xda\0\2" * 1000):
        commented = content[:2] + b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment + content[2:]
        assert np.array_equal(pixels(commented), pixels(content))
        half = len(commented) * 3 // 4
        with pytest.raises(UnreadableImage, match=r"JPEG.*damaged"):
            decode(commented[:half] + bytes(len(commented) - half))


def test_a_jpeg_whose_second_half_was_never_copied_is_refused() -> None:
    noise = np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = encoded(noise, "JPEG")
    with pytest.raises(UnreadableImage, match=r"JPEG.*damaged"):
        decode(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


def test_pillows_global_state_does_not_change() -> None:
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    assert Image.MAX_IMAGE_PIXELS == (1024**3 // 4 // 3)


def test_an_error_does_not_quote_the_decoder() -> None:
    with pytest.raises(DataError) as caught:
        decode(REAL["PNG"][:-30])
    assert "PNG" in str(caught.value)
    assert str(caught.value.__cause__) not in str(caught.value)


# What is not read

TIFF, ICO, PPM = (encoded(GRADIENT, format) for format in ("TIFF", "ICO", "PPM"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TIFF, "TIFF .*JPEG, PNG, WebP, BMP, GIF and HEIC"),
        (b"MM\0*\0\0\0\x08", "Its format is TIFF"),
        (ICO, "Its format is ICO"),
        (PPM, "Its format is PPM"),
        (b"P3 1 1 255 0 0 0", "Its format is PPM"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "Its format is PostScript"),
        (b"%PDF-1.7\n", "Its format is PDF"),
        (b"8BPS\0\1" + bytes(20), "Its format is Photoshop"),
        (b"\0\0\0\x14ftypheic\0\0\0\0mif1", "HEIC.*damaged"),
        (b"\0\0\0\x14ftypmif1\0\0\0\0avif", "HEIC.*damaged"),
        (b"\0\0\0\x1cftypavif\0\0\0\0", "Its format is AVIF"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "Its format is a video"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "Its format is JPEG 2000"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "Its format is JPEG XL"),
        (b"PK\3\4" + bytes(30), "Its format is ZIP"),
        (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "Its format is SVG"),
        (b"<!DOCTYPE html>\n<html><title>404</title></html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        ("\ufeffSehr geehrte Käferfreunde".encode(), "text"),
        (("ä" * 600).encode(), "text"),
        (b"", "empty"),
        (bytes(5000), "only zero bytes"),
        (b"\x01\x02\x03\xfe", "01 02 03 fe"),
        (b"RIFF\0\0\0\0WAVEfmt ", "52 49 46 46 00 00 00 00"),
    ],
)
def test_formats_that_are_not_read_are_named(content: bytes, message: str) -> None:
    with pytest.raises(UnreadableImage, match=message):
        decode(content)


@pytest.mark.parametrize("start", [b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP", b"BM", b"GIF89a"])
def test_a_signature_alone_is_refused(start: bytes) -> None:
    for content in (start, start + bytes(100), start + b"\xff" * 100):
        with pytest.raises(UnreadableImage):
            decode(content)


def test_the_content_decides_and_not_the_name(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(TIFF)
    with pytest.raises(UnreadableImage, match="Its format is TIFF"):
        decode(path)
    path.write_bytes(encoded(GRADIENT, "BMP"))
    assert np.array_equal(pixels(path), GRADIENT)


def test_pipes_and_folders_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for name in ("pipe.png", "", "absent.png"):
        with pytest.raises(UnreadableImage):
            decode(tmp_path / name)
    with pytest.raises(UnreadableImage):
        decode("a\0b.png")


def test_a_file_larger_than_any_image_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "film.jpg"
    with path.open("wb") as file:
        file.truncate(images.MAX_BYTES + 1)  # takes no room on the disk
    with pytest.raises(UnreadableImage, match="536,870,913 bytes"):
        decode(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read whatever the permissions say")
def test_a_file_without_read_permission_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(REAL["PNG"])
    path.chmod(0)
    with pytest.raises(UnreadableImage, match="Permission denied"):
        decode(path)


def test_a_disk_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(REAL["PNG"])

    def fail(descriptor: int) -> os.stat_result:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        with pytest.raises(UnreadableImage) as caught:
            decode(tmp_path / "a.png")
    assert "Input/output error" in str(caught.value)


def test_too_little_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(image: Image.Image, kind: str) -> Image.Image:
        raise MemoryError

    monkeypatch.setattr(images, "_in_colour", fail)
    with pytest.raises(UnreadableImage, match="memory"):
        decode(REAL["PNG"])


# All at once, and anything at all


def test_many_threads_decode_the_same_as_one() -> None:
    contents = [*REAL.values()] * 6
    expected = [pixels(content, size=16) for content in contents]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda content: pixels(content, size=16), contents))
    assert all(np.array_equal(one, other) for one, other in zip(expected, found, strict=True))


HURRIED = settings(
    max_examples=200,
    deadline=timedelta(seconds=3),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def read_or_refused(content: bytes) -> None:
    try:
        assert min(pixels(content).shape) >= 1
        assert pixels(content, size=8).shape == (8, 8, 3)
    except UnreadableImage as error:
        assert str(error).endswith(".")


@HURRIED
@given(
    start=st.sampled_from([signature for place, signature, _ in images.SIGNATURES if place == 0] + [b""]),
    rest=st.binary(max_size=300),
)
def test_random_bytes_are_an_image_or_refused(start: bytes, rest: bytes) -> None:
    read_or_refused(start + rest)


@HURRIED
@given(name=st.sampled_from([*REAL]), changes=st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=6)), max_size=5))
def test_an_image_with_random_changes_is_an_image_or_refused(name: str, changes: list[tuple[float, bytes]]) -> None:
    content = bytearray(REAL[name])
    for place, replacement in changes:
        start = int(place * len(content))
        content[start : start + len(replacement)] = replacement
    read_or_refused(bytes(content))


@HURRIED
@given(name=st.sampled_from([*REAL]), begin=st.floats(0, 1), end=st.floats(0, 1), twice=st.booleans())
def test_an_image_with_a_part_removed_or_repeated_is_an_image_or_refused(
    name: str, begin: float, end: float, twice: bool
) -> None:
    content = REAL[name]
    first, last = sorted((int(begin * len(content)), int(end * len(content))))
    read_or_refused(content[:last] + content[first:] if twice else content[:first] + content[last:])


@HURRIED
@given(name=st.binary(min_size=4, max_size=4), body=st.binary(max_size=60), after=st.booleans())
def test_a_png_with_any_chunk_is_an_image_or_refused(name: bytes, body: bytes, after: bool) -> None:
    """Chunks with correct checksums, which random changes never produce."""
    extra = chunk(name, body)
    read_or_refused(png(32, 24, 8, 2, ROWS, after=extra) if after else png(32, 24, 8, 2, ROWS, before=extra))
