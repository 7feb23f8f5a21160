"""HEIC files reduced to their primary image, so that the decoder sees nothing else.

A HEIF file is a small database: items (coded images, grids of tiles, metadata), properties of items, and references
between items. A few hundred bytes can make a decoder allocate gigabytes or run for hours: a crop that hides a large
image, an overlay with a large canvas, one tile or metadata block that is referenced thousands of times. `primary_image`
therefore parses the file strictly and writes a new one with only the primary image, its tiles and its alpha plane.

The boxes are defined in ISO/IEC 14496-12 (the container) and ISO/IEC 23008-12 (images).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

CODED, GRID = b"hvc1", b"grid"  # item types that are read: an image coded with HEVC, and a grid of such tiles
PROPERTIES = (b"hvcC", b"ispe", b"pixi", b"colr", b"auxC", b"clap", b"irot", b"imir")  # the ones that are copied
# The references that are copied: from an alpha plane to its image, from a premultiplied image to its alpha plane, and
# from a grid to its tiles.
REFERENCES = {CODED: (b"auxl", b"prem"), GRID: (b"auxl", b"prem", b"dimg")}
MAX_PROPERTIES = 20  # of an item; each rotation or crop is a pass over all pixels
ALPHA = {b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha", b"urn:mpeg:hevc:2015:auxid:1"}


class Unsupported(ValueError):
    """A valid HEIF file whose primary image is not HEVC, or needs a feature that is not read; `kind` is its type."""

    def __init__(self, kind: bytes) -> None:
        super().__init__(kind)
        self.kind = kind.decode("ascii", "replace")


@dataclass
class _Item:
    kind: bytes
    properties: list[tuple[bool, bytes]] = field(default_factory=list)  # (is essential, box), in the order they apply
    extents: list[tuple[int, int, int]] = field(default_factory=list)  # (construction method, offset, length)

    def boxes(self, name: bytes) -> list[bytes]:
        return [box for _, box in self.properties if box[4:8] == name]

    @property
    def size(self) -> tuple[int, int]:
        """(width, height). libheif refuses a coded image that is larger than this says."""
        (box,) = self.boxes(b"ispe")
        width, height = struct.unpack_from(">II", box, 12)
        return width, height

    def check(self) -> None:
        """Refuse properties that are not copied although they matter."""
        for essential, box in self.properties:
            if essential and box[4:8] not in PROPERTIES:
                raise Unsupported(box[4:8])
        if len(self.properties) > MAX_PROPERTIES:
            raise ValueError("too many properties")


class _Meta(NamedTuple):
    """What a `meta` box says about images."""

    primary: int
    items: dict[int, _Item]
    references: list[tuple[bytes, int, list[int]]]  # (type, from, to)
    data: bytes  # the `idat` box, used by construction method 1


def primary_image(content: bytes) -> tuple[bytes, tuple[int, int], int]:
    """The file with nothing but its primary image, the size (width, height) of that, and the pixels to decode in all.

    The size is that before crops and rotations. The pixels are those of the image, of each use of a tile, and the same
    for its alpha plane. A damaged file raises one of various exceptions.
    """
    meta = _read_meta(content)
    ids = _needed(meta)
    items = [meta.items[each] for each in ids]
    for item in items:
        item.check()
    new_id = {old: new for new, old in enumerate(ids, 1)}
    references = [
        (name, new_id[source], [new_id[target] for target in targets if target in new_id])
        for name, source, targets in meta.references
        if source in new_id and name in REFERENCES[meta.items[source].kind]
    ]
    uses = Counter(tile for name, _, tiles in references if name == b"dimg" for tile in tiles)
    sizes = [item.size for item in items]
    pixels = sum(width * height * max(uses[each], 1) for each, (width, height) in enumerate(sizes, 1))
    if sum(length for item in items for _, _, length in item.extents) > len(content):
        raise ValueError("items overlap")
    data = [_data(item, content, meta.data) for item in items]
    return _write(items, references, data), sizes[0], pixels


def _needed(meta: _Meta) -> list[int]:
    """The ids of the items that make up the primary image, starting with its own."""
    tiles: dict[int, list[int]] = {}
    for name, source, targets in meta.references:
        if name == b"dimg":
            tiles.setdefault(source, []).extend(targets)

    def with_tiles(image: int) -> list[int]:
        kind = meta.items[image].kind
        if kind == CODED:
            return [image]
        for each in [meta.items[tile].kind for tile in tiles[image]] if kind == GRID else [kind]:
            if each != CODED:
                raise Unsupported(each)
        return [image, *tiles[image]]

    ids = dict.fromkeys(with_tiles(meta.primary))
    for name, source, targets in meta.references:
        if name == b"auxl" and not ids.keys().isdisjoint(targets):
            kinds = {box[12:].split(b"\0")[0] for box in meta.items[source].boxes(b"auxC")}
            ids |= dict.fromkeys(with_tiles(source) if kinds & ALPHA else ())
    return list(ids)


def _data(item: _Item, file: bytes, idat: bytes) -> bytes:
    pieces = []
    for method, offset, length in item.extents:
        source = (file, idat)[method]
        if offset + length > len(source):
            raise EOFError
        pieces.append(source[offset : offset + length])
    data = b"".join(pieces)
    if item.kind == CODED and data[-1:] in (b"", b"\0"):  # no HEVC data ends with a zero; an interrupted copy does
        raise EOFError
    return data


# Reading


class _Reader:
    """Reads big-endian integers of a box, one after another. Past the end, it raises EOFError."""

    def __init__(self, body: bytes) -> None:
        self.body, self.place = body, 0

    def __call__(self, size: int) -> int:
        self.place += size
        if self.place > len(self.body):
            raise EOFError
        return int.from_bytes(self.body[self.place - size : self.place])


def _boxes(content: bytes, place: int = 0) -> Iterator[tuple[bytes, bytes]]:
    """(name, content) of each box from `place` on."""
    while place < len(content):
        length, name = struct.unpack_from(">I4s", content, place)
        header = 8
        if length == 1:
            (length,) = struct.unpack_from(">Q", content, place + 8)
            header = 16
        length = length or len(content) - place  # 0: up to the end
        if length < header or place + length > len(content):
            raise EOFError
        yield name, content[place + header : place + length]
        place += length


def _read_meta(content: bytes) -> _Meta:
    name, body = next(box for box in _boxes(content) if box[0] in (b"meta", b"mini", b"moov"))
    if name != b"meta":  # a minimised file; a sequence without a still image
        raise Unsupported(name)
    parts = dict(_boxes(body, 4))
    items = _read_items(parts[b"iinf"])
    properties, extents = _read_properties(parts[b"iprp"]), _read_extents(parts[b"iloc"])
    for number, item in items.items():
        item.properties, item.extents = properties.get(number, []), extents.get(number, [])
    read = _Reader(parts[b"pitm"])
    version, _ = read(1), read(3)
    primary = read(4 if version else 2)
    return _Meta(primary, items, _read_references(parts.get(b"iref", bytes(4))), parts.get(b"idat", b""))


def _read_items(body: bytes) -> dict[int, _Item]:
    items = {}
    for _, entry in _boxes(body, 8 if body[0] else 6):
        read = _Reader(entry)
        version, _ = read(1), read(3)
        if version >= 2:  # older ones describe no images
            number, _protection, kind = read(2 if version == 2 else 4), read(2), read(4)
            items[number] = _Item(kind.to_bytes(4))
    return items


def _read_properties(body: bytes) -> dict[int, list[tuple[bool, bytes]]]:
    parts = list(_boxes(body))
    boxes = [_box(*box) for container, inner in parts if container == b"ipco" for box in _boxes(inner)]
    properties: dict[int, list[tuple[bool, bytes]]] = {}
    for read in (_Reader(inner) for name, inner in parts if name == b"ipma"):
        version, flags = read(1), read(3)
        size = 2 if flags & 1 else 1
        essential = 1 << 8 * size - 1  # this bit of an index marks an essential property
        for _ in range(read(4)):
            number = read(4 if version else 2)
            indices = [read(size) for _ in range(read(1))]
            chosen = [(index >= essential, boxes[index % essential - 1]) for index in indices if index % essential]
            properties.setdefault(number, []).extend(chosen)
    return properties


def _read_extents(body: bytes) -> dict[int, list[tuple[int, int, int]]]:
    read = _Reader(body)
    version, _ = read(1), read(3)
    offset_size, length_size = divmod(read(1), 16)
    base_size, index_size = divmod(read(1), 16)
    if length_size == 0:  # extents that take no bytes could be billions
        raise ValueError("extents without lengths")
    items: dict[int, list[tuple[int, int, int]]] = {}
    for _ in range(read(4 if version == 2 else 2)):
        number = read(4 if version == 2 else 2)
        method = read(2) % 16 if version else 0
        _data_reference, base = read(2), read(base_size)
        items[number] = []
        for _ in range(read(2)):
            _index, offset, length = read(index_size if version else 0), read(offset_size), read(length_size)
            items[number].append((method, base + offset, length))
    return items


def _read_references(body: bytes) -> list[tuple[bytes, int, list[int]]]:
    size = 4 if body[0] else 2
    readers = ((name, _Reader(content)) for name, content in _boxes(body, 4))
    return [(name, read(size), [read(size) for _ in range(read(2))]) for name, read in readers]


# Writing


def _write(items: list[_Item], references: list[tuple[bytes, int, list[int]]], data: list[bytes]) -> bytes:
    """A HEIC file with these items, numbered from 1; the first is the primary image."""
    count = struct.pack(">H", len(items))
    entries = [
        _box(b"infe", b"\2\0\0\0", struct.pack(">HH", number, 0), item.kind, b"\0")
        for number, item in enumerate(items, 1)
    ]
    links = [_box(name, struct.pack(f">HH{len(to)}H", source, len(to), *to)) for name, source, to in references]
    parts = [
        _box(b"hdlr", bytes(8), b"pict", bytes(13)),
        _box(b"pitm", bytes(4), struct.pack(">H", 1)),
        _box(b"iinf", bytes(4), count, *entries),
        _box(b"iprp", *_written_properties(items)),
        _box(b"iref", bytes(4), *links),
    ]
    header = _box(b"ftyp", b"heic", bytes(4), b"mif1heic")
    location = struct.Struct(">HHHII")
    start = len(header) + 12 + sum(map(len, parts)) + 16 + location.size * len(items) + 8  # of the data
    locations = []
    for number, piece in enumerate(data, 1):
        locations.append(location.pack(number, 0, 1, start, len(piece)))
        start += len(piece)
    parts.append(_box(b"iloc", bytes(4), b"\x44\0", count, *locations))
    return header + _box(b"meta", bytes(4), *parts) + _box(b"mdat", *data)


def _written_properties(items: list[_Item]) -> tuple[bytes, bytes]:
    """The boxes `ipco`, with each property once, and `ipma`, which assigns them to the items."""
    chosen = [[box for _, box in item.properties if box[4:8] in PROPERTIES] for item in items]
    index = {box: number for number, box in enumerate(dict.fromkeys(box for boxes in chosen for box in boxes), 1)}
    assigned = [
        struct.pack(f">HB{len(boxes)}H", number, len(boxes), *(0x8000 | index[box] for box in boxes))
        for number, boxes in enumerate(chosen, 1)
    ]
    return _box(b"ipco", *index), _box(b"ipma", b"\0\0\0\1", struct.pack(">I", len(items)), *assigned)


def _box(name: bytes, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return struct.pack(">I4s", 8 + len(content), name) + content
