"""Codebooks of product quantisation: vectors are turned, cut into parts, and of each part a few centroids are found.

They are stretched too: small directions tell classes apart as well as large ones do, and if every error counted the
same, all bytes would go to the large ones and nothing of the small ones would be left.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from engram.errors import not_installed
from engram.network import parallel
from engram.randomness import generator

CENTROIDS = 256  # of each part: as many as a byte tells apart
ITERATIONS = 25  # of k-means
MOST = 2**16  # vectors that centroids are found from
TRIAL_ITERATIONS, TRIED = 5, 2**12  # of k-means, and vectors, that tell which rotation is the best
NOTHING = 1e-9  # what a direction's size is at the least, beside the largest: those that no vector has
STRETCH = 0.25  # s: an error counts by the mean square of its direction to the power of -s (docs/findings.md, Bytes)

Turned = tuple[Tensor, Tensor]  # a basis (d, d), and centroids of the parts of vectors in it (m, 256, d / m)


def installed() -> bool:
    """Whether there is faiss."""
    return find_spec("faiss") is not None


def check_installed() -> None:
    """Refuse to go on without faiss."""
    _faiss()


def codebook_and_codes(
    vectors: Tensor, parts: int, before: Turned | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Centroids of each part, float16 (m, min(256, n), d / m), which is the nearest, uint8 (n, m), and the basis.

    The basis, float16 (d, d), has in its columns what vectors (n, d) are cut into parts of: `vectors` are
    `in_basis(vectors, basis) @ basis.T`. With `before`, by which some of the vectors were kept, what has not moved
    since stays where it was, or nearly. As many vectors as there are centroids, or fewer, are their own, and no basis
    is needed.
    """
    count, dimension = vectors.shape
    if count > CENTROIDS:
        return parallel.broadcast(lambda: _found(vectors, parts, before))
    codebook = vectors.reshape(count, parts, dimension // parts).transpose(0, 1)  # (m, n, d / m)
    codes = torch.arange(count, dtype=torch.uint8)[:, None].expand(count, parts)
    return codebook.half().contiguous(), codes.contiguous(), None


def in_basis(vectors: Tensor, basis: Tensor) -> Tensor:
    """Vectors (n, d) as multiples (n, d) of a basis's columns (d, d)."""
    inverse: Tensor = torch.linalg.inv(basis.float())
    return vectors @ inverse.T


def _found(vectors: Tensor, parts: int, before: Turned | None) -> tuple[Tensor, Tensor, Tensor]:
    """By principal directions, by none, or by those before: what a few steps of k-means bring nearest.

    Vectors with many zeros are best left as they are: turned, they have none.
    """
    some, few = _spread(vectors, MOST), _spread(vectors, TRIED)
    sizes, directions = _principal(some)
    order = _dealt_out(sizes, parts)
    ways: list[tuple[Tensor, Tensor | None]] = [
        ((directions * sizes.pow(STRETCH / 2))[:, order].half(), None),
        (_own_sizes(some).pow(STRETCH / 2).diag().half(), None),
    ]
    ways += [before] if before is not None else []
    weights = (directions * sizes.pow(-STRETCH / 2)).float()  # (d, d): an error times these is as large as it counts
    basis, start = min(ways, key=lambda way: _distortion(few, parts, way[0], way[1], weights))
    codebook = _centroids(in_basis(some, basis), parts, ITERATIONS, start).half()
    return codebook, _nearest(codebook.float(), in_basis(vectors, basis)), basis


def _spread(vectors: Tensor, most: int) -> Tensor:
    return vectors[:: -(-len(vectors) // most)]


def _principal(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Principal directions of vectors (n, d), in columns (d, d), and their mean squares (d,), float64."""
    sizes, directions = torch.linalg.eigh(vectors.T.double() @ vectors.double() / len(vectors))
    return sizes.clamp(min=NOTHING * float(sizes[-1])), directions


def _own_sizes(vectors: Tensor) -> Tensor:
    sizes = vectors.double().square().mean(dim=0)
    return sizes.clamp(min=NOTHING * float(sizes.max()))


def _dealt_out(sizes: Tensor, parts: int) -> list[int]:
    """An order of directions, by their mean squares (d,), in which all parts have about as much to tell.

    Features vary along few directions. Cut as they are, parts share them by chance, and many bytes say next to nothing
    (Ge et al., 2013, §3.2).
    """
    worth, share = (sizes / sizes.min()).log(), len(sizes) // parts
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for direction in sizes.argsort(descending=True).tolist():  # each to the part that has the least so far
        open_ones = [part for part in dealt if len(part) < share]
        min(open_ones, key=lambda part: float(worth[part].sum())).append(direction)
    return [direction for part in dealt for direction in part]


def _distortion(vectors: Tensor, parts: int, basis: Tensor, start: Tensor | None, weights: Tensor) -> float:
    """How far a few steps of k-means leave vectors (n, d) from their centroids, as `weights` (d, d) count it."""
    turned = in_basis(vectors, basis)
    centroids = _centroids(turned, parts, TRIAL_ITERATIONS, start)
    nearest = centroids[torch.arange(parts), _nearest(centroids, turned).long()]  # (n, m, d / m)
    return float(((turned - nearest.flatten(1)) @ basis.float().T @ weights).square().sum())


def _centroids(vectors: Tensor, parts: int, iterations: int, start: Tensor | None) -> Tensor:
    """K-means of all parts at once, from `start` or from some of the vectors: (m, 256, d / m).

    faiss finds the nearest centroids, which is the work. Its own k-means takes eight times as long, and ends further
    from vectors that have many zeros: there, a centroid that is nearest to none becomes half of another; here it goes
    to the worst served.
    """
    first = torch.randperm(len(vectors), generator=generator(0, "codebook"))[:CENTROIDS]
    centroids = _cut(vectors[first], parts).transpose(0, 1) if start is None else start.float()
    for _ in range(iterations):
        centroids = _improved(centroids, _cut(vectors, parts), _nearest(centroids, vectors).long())
    return centroids


def _cut(vectors: Tensor, parts: int) -> Tensor:
    return vectors.reshape(len(vectors), parts, -1)  # (n, m, d / m)


def _nearest(centroids: Tensor, vectors: Tensor) -> Tensor:
    """Which centroid is the nearest to each part, uint8 (n, m)."""
    parts, _, length = centroids.shape
    faiss = _faiss()
    quantiser = faiss.ProductQuantizer(parts * length, parts, 8)
    faiss.copy_array_to_vector(centroids.flatten().numpy(), quantiser.centroids)
    return torch.from_numpy(quantiser.compute_codes(vectors.numpy()))


def _improved(centroids: Tensor, cut: Tensor, codes: Tensor) -> Tensor:
    """The means of those that each centroid (m, 256, d / m) is the nearest to, of `cut` (n, m, d / m)."""
    parts, _, length = centroids.shape
    places = (codes + CENTROIDS * torch.arange(parts)).flatten()  # (n m,): of each part's centroid among all
    sums = torch.zeros(parts * CENTROIDS, length, dtype=torch.float64)
    sums.index_add_(0, places, cut.reshape(-1, length).double())
    counts = torch.bincount(places, minlength=parts * CENTROIDS)
    means = (sums / counts.clamp(min=1)[:, None]).float().reshape_as(centroids)
    unused = (counts == 0).reshape(parts, CENTROIDS)
    for part in unused.any(dim=1).nonzero().squeeze(1).tolist():
        distances = (cut[:, part] - means[part, codes[:, part]]).square().sum(dim=1)  # (n,)
        idle = unused[part].nonzero().squeeze(1)
        means[part, idle] = cut[distances.argsort(descending=True, stable=True)[: len(idle)], part]
    return means


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise not_installed("To keep vectors by product quantisation (the codec pq), faiss-cpu", "compress") from error
    return faiss
