"""HEIC photos are decoded like other images; files that need more work than one image are refused."""

from __future__ import annotations

import io
import struct
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from images_made import Pixels, encoded, exif, gradient, heic, needs_heic
from PIL import Image, ImageOps, UnidentifiedImageError

from engram.data import heif
from engram.data.images import UnreadableImage, decode, extent
from engram.data.labelled import scan

pytestmark = needs_heic

GRADIENT = gradient()
FADING = np.tile(np.linspace(0, 255, 32).astype(np.uint8), (24, 1))


def pixels(content: bytes, **options: int) -> Pixels:
    array: Pixels = decode(content, **options).numpy()
    return array


# Photos


@pytest.mark.parametrize("size", [(24, 32), (64, 64), (1, 1), (101, 67)])
def test_a_lossless_photo_keeps_its_pixels(size: tuple[int, int]) -> None:
    image = gradient(*size)
    assert np.array_equal(pixels(heic(image)), image)
    assert extent(heic(image)) == (size[1], size[0])


def test_a_lossy_photo_is_close_to_the_original() -> None:
    image = gradient(240, 320)
    found = pixels(heic(image, quality=90, chroma=420, matrix_coefficients=6)).astype(float)
    assert np.abs(found - image).max() <= 8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_rotated_once(orientation: int) -> None:
    """pillow-heif stores the orientation twice: as the properties irot and imir, and in the EXIF block."""
    block = exif(orientation)
    content = heic(GRADIENT, exif=block)
    assert block in content
    with Image.open(io.BytesIO(encoded(GRADIENT, "PNG", exif=block))) as image:
        expected = np.array(ImageOps.exif_transpose(image))
    assert np.array_equal(pixels(content), expected)
    assert extent(content) == (expected.shape[1], expected.shape[0])


def test_transparency_is_composited_on_white() -> None:
    share = FADING[..., None] / 255
    expected = GRADIENT * share + 255 * (1 - share)
    found = pixels(heic(np.dstack([GRADIENT, FADING])))
    assert np.abs(found - expected).max() <= 1


def test_premultiplied_colours_are_restored_before_compositing() -> None:
    opacity = np.maximum(FADING, 128)  # with less, eight bits are too few to restore a colour
    share = opacity[..., None] / 255
    premultiplied = Image.fromarray(np.dstack([GRADIENT, opacity])).convert("RGBa")
    stored = heic_of_mode(premultiplied, "RGBa")
    assert b"prem" in stored
    found = pixels(stored)
    assert np.abs(found - (GRADIENT * share + 255 * (1 - share))).max() <= 2


def heic_of_mode(image: Image.Image, mode: str) -> bytes:
    import pillow_heif

    file = io.BytesIO()
    stored = pillow_heif.from_bytes(mode=mode, size=image.size, data=image.tobytes())
    stored.save(file, quality=-1, chroma=444, matrix_coefficients=0)
    return file.getvalue()


def test_grey_and_ten_bit_photos_keep_their_brightness() -> None:
    grey = GRADIENT[..., 0]
    assert np.array_equal(pixels(heic(grey)), np.stack([grey] * 3, -1))
    sixteen = Image.fromarray(grey.astype(np.uint16) * 257)
    assert np.abs(pixels(heic(sixteen))[..., 0].astype(float) - grey).max() <= 1


def test_a_photo_in_tiles_is_assembled() -> None:
    image = gradient(150, 200)
    content = heic(image, tile_size=64)
    assert content.count(b"hvc1") == 12
    assert np.array_equal(pixels(content), image)


def test_the_primary_one_of_several_images_is_read() -> None:
    images = [Image.new("RGB", (48, 16), "red"), Image.fromarray(GRADIENT), Image.new("RGB", (16, 48), "blue")]
    for position, image in enumerate(images):
        content = heic(*images, primary_index=position)
        assert extent(content) == image.size
        assert np.array_equal(pixels(content), np.array(image))


def test_a_small_square_is_made_from_the_photo_not_from_its_thumbnail() -> None:
    image = gradient(128, 128)
    content = heic(image, thumbnails=[64])
    assert b"thmb" in content
    assert np.array_equal(pixels(content, size=16), pixels(heic(image), size=16))
    reduced = heif.primary_image(content)[0]
    assert b"thmb" not in reduced and np.array_equal(pixels(reduced), image)


def test_metadata_is_not_passed_to_the_decoder() -> None:
    content = heic(GRADIENT, exif=exif(6), xmp=b"<x:xmpmeta/>")
    assert b"Exif" in content and b"xmpmeta" in content
    reduced = heif.primary_image(content)[0]
    assert b"Exif" not in reduced and b"xmpmeta" not in reduced


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"])
def test_every_brand_is_recognised(brand: bytes) -> None:
    content = heic(GRADIENT)
    assert np.array_equal(pixels(content[:8] + brand + content[12:]), GRADIENT)


def test_the_decoder_is_not_registered_with_pillow() -> None:
    content = heic(GRADIENT)
    decode(content)
    assert "HEIF" not in Image.OPEN
    with pytest.raises(UnidentifiedImageError):
        Image.open(io.BytesIO(content))


# Without the package


def test_without_the_package_the_error_names_the_format_and_the_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    photo = heic(GRADIENT)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)  # importing it raises ImportError
    for function in (decode, extent):
        with pytest.raises(UnreadableImage, match=r"HEIC.*pillow-heif.*pip install.*\[heic\].*JPEG"):
            function(photo)
    assert decode(encoded(GRADIENT, "PNG")).shape == (24, 32, 3)  # other formats need no package


# Folders


def test_photos_are_found_by_their_extensions(tmp_path: Path) -> None:
    names = ("IMG_1.HEIC", "a.heic", "b.heif", "c.hif")
    (tmp_path / "cat").mkdir()
    for name in names:
        (tmp_path / "cat" / name).write_bytes(heic(GRADIENT))
    found = scan(tmp_path)
    assert [path.name for path in found.paths] == sorted(names) and not found.skipped


# Files that ask for too much


def box(name: bytes, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return struct.pack(">I4s", 8 + len(content), name) + content


def image_size(width: int, height: int) -> bytes:
    return box(b"ispe", bytes(4), struct.pack(">II", width, height))


def crop(width: int, height: int) -> bytes:
    return box(b"clap", struct.pack(">IIIIiIiI", width, 1, height, 1, 0, 1, 0, 1))


def grid(rows: int, columns: int, width: int, height: int) -> bytes:
    return bytes([0, 1, rows - 1, columns - 1]) + struct.pack(">II", width, height)


def overlay(width: int, height: int) -> bytes:
    return bytes([0, 1]) + struct.pack(">4HIIii", 0, 0, 0, 0xFFFF, width, height, 0, 0)


IS_ALPHA = box(b"auxC", bytes(4), b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha\0")

Item = tuple[bytes, bytes, list[bytes]]  # type, data, properties


def file_of(items: list[Item], references: list[tuple[bytes, int, list[int]]] | None = None) -> bytes:
    """A HEIF file of these items, numbered from 1; the first is the primary image."""
    properties = [each for *_, own in items for each in own]
    entries = [
        box(b"infe", b"\2\0\0\0", struct.pack(">HH", number, 0), kind, b"\0")
        for number, (kind, *_) in enumerate(items, 1)
    ]
    assigned, taken = b"", 0
    for number, (_, _, own) in enumerate(items, 1):
        assigned += struct.pack(">HB", number, len(own)) + bytes(0x80 | taken + 1 + each for each in range(len(own)))
        taken += len(own)
    links = [box(name, struct.pack(f">HH{len(to)}H", source, len(to), *to)) for name, source, to in references or []]

    def head(start: int) -> bytes:
        locations = b""
        for number, (_, data, _) in enumerate(items, 1):
            locations += struct.pack(">HHHII", number, 0, 1, start, len(data))
            start += len(data)
        return box(b"ftyp", b"heic", bytes(4), b"mif1heic") + box(
            b"meta",
            bytes(4),
            box(b"hdlr", bytes(8), b"pict", bytes(13)),
            box(b"pitm", bytes(4), struct.pack(">H", 1)),
            box(b"iloc", bytes(4), b"\x44\0", struct.pack(">H", len(items)), locations),
            box(b"iinf", bytes(4), struct.pack(">H", len(items)), *entries),
            box(b"iprp", box(b"ipco", *properties), box(b"ipma", bytes(4), struct.pack(">I", len(items)), assigned)),
            *([box(b"iref", bytes(4), *links)] if links else []),
        )

    return head(len(head(0)) + 8) + box(b"mdat", *(data for _, data, _ in items))


def coded(side: int) -> tuple[bytes, bytes]:
    """(data, hvcC) of a red square."""
    content = heic(Image.new("RGB", (side, side), "red"), quality=50, chroma=420, matrix_coefficients=6)
    start = content.index(b"hvcC") - 4
    (length,) = struct.unpack_from(">I", content, start)
    return content[content.index(b"mdat") + 4 :], content[start : start + length]


@pytest.fixture(scope="module")
def small() -> Item:
    data, configuration = coded(64)
    return b"hvc1", data, [configuration, image_size(64, 64)]


@pytest.fixture(scope="module")
def large() -> Item:
    data, configuration = coded(1024)
    return b"hvc1", data, [configuration, image_size(1024, 1024)]


def with_properties(item: Item, *properties: bytes) -> Item:
    return item[0], item[1], [*item[2], *properties]


LIMIT = 64 * 64


def refused(content: bytes, match: str, limit: int = LIMIT) -> None:
    start = time.perf_counter()
    for function in (decode, extent):
        with pytest.raises(UnreadableImage, match=match):
            function(content, limit=limit)
    assert time.perf_counter() - start < 0.5


def test_the_builder_makes_files_that_are_read(small: Item, large: Item) -> None:
    assert decode(file_of([small]), limit=LIMIT).shape == (64, 64, 3)
    tiled = [(b"grid", grid(1, 2, 128, 64), [image_size(128, 64)]), small]
    assert decode(file_of(tiled, [(b"dimg", 1, [2, 2])]), limit=2 * LIMIT).shape == (64, 128, 3)
    alpha = file_of([small, with_properties(small, IS_ALPHA)], [(b"auxl", 2, [1])])
    assert decode(alpha, limit=LIMIT)[0, 0, 1] > 100  # not opaque, so that the white shows through
    assert decode(file_of([with_properties(large, crop(10, 20))])).shape == (20, 10, 3)


def test_the_limit_is_of_pixels_and_may_be_reached(small: Item) -> None:
    refused(file_of([small]), "^It is 64 x 64 pixels; at most 4,095 in all", LIMIT - 1)
    assert extent(file_of([small]), limit=LIMIT) == (64, 64)


def test_a_photo_that_declares_too_many_pixels_is_refused_before_decoding(small: Item) -> None:
    kind, data, (configuration, _) = small
    content = file_of([(kind, data, [configuration, image_size(60_000, 60_000)])])
    refused(content, "^It is 60,000 x 60,000 pixels; at most 64,000,000 in all", 64_000_000)


def test_a_crop_does_not_hide_a_large_image(large: Item) -> None:
    refused(file_of([with_properties(large, crop(10, 10))]), "^It is 1,024 x 1,024 pixels")


def test_a_crop_does_not_enlarge_an_image(small: Item) -> None:
    refused(file_of([with_properties(small, crop(2000, 2000))]), "^It is 2,000 x 2,000 pixels")


def test_coded_data_larger_than_declared_is_refused(large: Item) -> None:
    kind, data, (configuration, _) = large
    with pytest.raises(UnreadableImage, match="damaged"):
        decode(file_of([(kind, data, [configuration, image_size(64, 64)])]))


def test_an_image_has_one_size(large: Item) -> None:
    for sizes in ([image_size(64, 64)], [image_size(64, 64)] * 2):
        refused(file_of([with_properties(large, *sizes)]), "is damaged")
    kind, data, (configuration, _) = large
    refused(file_of([(kind, data, [configuration])]), "is damaged")


def test_each_use_of_a_tile_counts(large: Item) -> None:
    items = [(b"grid", grid(10, 50, 64, 64), [image_size(64, 64)]), large]
    content = file_of(items, [(b"dimg", 1, [2] * 500)])
    refused(content, "tiles have 524,292,096 pixels in all", 64_000_000)


def test_an_alpha_plane_counts(small: Item, large: Item) -> None:
    content = file_of([small, with_properties(large, IS_ALPHA)], [(b"auxl", 2, [1])])
    refused(content, "pixels in all")


def test_an_overlay_is_refused_whatever_its_canvas(small: Item) -> None:
    items = [(b"iovl", overlay(30_000, 30_000), [image_size(64, 64)]), small]
    refused(file_of(items, [(b"dimg", 1, [2])]), "^Its format is HEIF with 'iovl'")


def test_a_grid_of_grids_is_refused(small: Item) -> None:
    inner = (b"grid", grid(1, 1, 64, 64), [image_size(64, 64)])
    content = file_of([inner, inner, small], [(b"dimg", 1, [2]), (b"dimg", 2, [3])])
    refused(content, "^Its format is HEIF with 'grid'")


def test_items_that_share_their_bytes_are_refused(small: Item) -> None:
    tiles = [small] * 40
    content = file_of(
        [(b"grid", grid(2, 20, 1280, 128), [image_size(1280, 128)]), *tiles], [(b"dimg", 1, list(range(2, 42)))]
    )
    assert decode(content).shape == (128, 1280, 3)
    shared = bytearray(content)
    start = shared.index(b"iloc") + 12
    mdat = shared.index(b"mdat") + 4
    for number in range(41):
        struct.pack_into(">II", shared, start + 14 * number + 6, mdat, len(shared) - mdat)
    refused(bytes(shared), "is damaged", 64_000_000)


def test_too_many_rotations_are_refused(small: Item) -> None:
    turned = box(b"irot", b"\1")
    assert decode(file_of([with_properties(small, turned)])).shape == (64, 64, 3)
    refused(file_of([with_properties(small, *[turned] * 50)]), "is damaged")


def test_extents_that_take_no_bytes_are_refused() -> None:
    extents = struct.pack(">HHH", 1, 0, 65_535) * 500  # 500 items of 65,535 extents, without offsets and lengths
    content = box(b"ftyp", b"heic", bytes(4)) + box(
        b"meta",
        bytes(4),
        box(b"iinf", bytes(6)),
        box(b"iprp"),
        box(b"iloc", bytes(6), struct.pack(">H", 500), extents),
    )
    refused(content, "is damaged")


# Other files


def test_an_avif_is_not_read_whatever_its_brand(small: Item) -> None:
    refused(file_of([(b"av01", *small[1:])]), "^Its format is AVIF, and only JPEG.* convert it")
    tiled = [(b"grid", grid(1, 1, 64, 64), [image_size(64, 64)]), (b"av01", *small[1:])]
    refused(file_of(tiled, [(b"dimg", 1, [2])]), "^Its format is AVIF")


def test_an_essential_property_that_is_not_understood_is_refused(small: Item) -> None:
    """For example rref, with which an image consists of differences from another."""
    refused(file_of([with_properties(small, box(b"rref", bytes(8)))]), "^Its format is HEIF with 'rref'")


@pytest.mark.parametrize("name", [b"mini", b"moov"])
def test_a_file_without_items_is_named(name: bytes) -> None:
    refused(box(b"ftyp", b"mif1", bytes(4)) + box(name, bytes(40)), f"^Its format is HEIF with '{name.decode()}'")


@pytest.mark.parametrize("content", [b"", bytes(100), b"\xff" * 100], ids=["nothing", "zeros", "ones"])
def test_a_header_alone_is_refused(content: bytes) -> None:
    refused(b"\0\0\0\x18ftypheic\0\0\0\0" + content, "is damaged")


# Damaged


@pytest.mark.parametrize("options", [{}, {"tile_size": 64}], ids=["one image", "tiles"])
def test_a_truncated_photo_is_refused(options: dict[str, object]) -> None:
    content = heic(gradient(80, 100), **options)
    for length in [*range(12, len(content) - 40, 97), *range(len(content) - 40, len(content))]:
        with pytest.raises(UnreadableImage, match="damaged"):
            decode(content[:length])


def test_a_photo_whose_second_half_was_never_copied_is_refused() -> None:
    noise = np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = heic(noise)
    half = len(content) // 2
    with pytest.raises(UnreadableImage, match=r"HEIC.*damaged"):
        decode(content[:half] + bytes(len(content) - half))


@cache
def all_kinds() -> list[bytes]:
    return [
        heic(GRADIENT, exif=exif(6)),
        heic(np.dstack([GRADIENT, FADING])),
        heic(gradient(100, 100), tile_size=64, thumbnails=[32]),
    ]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    number=st.integers(0, 2),
    changes=st.lists(st.tuples(st.integers(0, 1000), st.binary(min_size=1, max_size=5)), min_size=1, max_size=4),
)
def test_a_photo_with_random_changes_in_its_header_is_read_or_refused(
    number: int, changes: list[tuple[int, bytes]]
) -> None:
    content = bytearray(all_kinds()[number])
    for place, replacement in changes:
        content[12 + place : 12 + place + len(replacement)] = replacement
    try:
        assert decode(bytes(content), limit=100_000).shape[2] == 3
    except UnreadableImage as error:
        assert str(error).endswith(".")
