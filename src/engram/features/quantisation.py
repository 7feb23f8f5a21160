"""Codebooks of product quantisation: rotation, stretching and k-means (Jégou et al., 2011; Ge et al., 2013)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engram.errors import not_installed
from engram.randomness import generator

CENTROIDS = 256  # of each part: as many as a byte can index
ITERATIONS = 25  # of k-means
MOST_VECTORS = 2**16  # from which centroids are computed
TRIAL_ITERATIONS, TRIAL_VECTORS = 5, 2**12  # of k-means, to choose the basis
SMALLEST = 1e-9  # mean square of a direction, relative to the largest
# s: errors are weighted by the mean square of their direction to the power of −s (docs/findings.md, Bytes)
STRETCH = 0.25


def in_basis(vectors: Tensor, basis: Tensor) -> Tensor:
    """The coordinates (n, d) of vectors (n, d) in the basis given by the columns of `basis` (d, d)."""
    inverse: Tensor = torch.linalg.inv(basis.float())
    return vectors @ inverse.T


def own_centroids(vectors: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Codes (n, m) and a codebook (m, n, d / m) in which every vector has centroids of its own: n <= 256."""
    count, dimension = vectors.shape
    codebook = vectors.reshape(count, parts, dimension // parts).transpose(0, 1)  # (m, n, d / m)
    codes = torch.arange(count, dtype=torch.uint8)[:, None].expand(count, parts)
    return codes.contiguous(), codebook.half().contiguous()


def quantise(
    vectors: Tensor, parts: int, previous: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, codebook and rotation in the best of three bases: principal directions, the dimensions, the previous one.

    Vectors with many zeros are best in their own dimensions: rotated, they have no zeros. From the `previous` rotation
    and codebook, vectors that have not changed are encoded almost as before.
    """
    some, few = _spread(vectors, MOST_VECTORS), _spread(vectors, TRIAL_VECTORS)
    sizes, directions = torch.linalg.eigh(some.T.double() @ some.double() / len(some))  # (d,), (d, d)
    sizes, own_sizes = _positive(sizes), _positive(some.double().square().mean(dim=0))
    order = _balanced_order(sizes, parts)
    bases: list[tuple[Tensor, Tensor | None]] = [
        ((directions * sizes.pow(STRETCH / 2))[:, order].half(), None),
        (own_sizes.pow(STRETCH / 2).diag().half(), None),
    ]
    if previous is not None:
        bases.append(previous)
    weights = (directions * sizes.pow(-STRETCH / 2)).float()  # (d, d): of errors
    basis, start = min(bases, key=lambda each: _distortion(few, parts, each[0], each[1], weights))
    codebook = _k_means(in_basis(some, basis), parts, ITERATIONS, start).half()
    return _nearest(codebook.float(), in_basis(vectors, basis)), codebook, basis


def _spread(vectors: Tensor, most: int) -> Tensor:
    return vectors[:: -(-len(vectors) // most)]


def _positive(sizes: Tensor) -> Tensor:
    return sizes.clamp(min=SMALLEST * float(sizes.max()))


def _balanced_order(sizes: Tensor, parts: int) -> list[int]:
    """An order of directions with mean squares `sizes` (d,) in which all parts carry about as much information.

    Features vary along few directions: in any other order, many bytes say next to nothing (Ge et al., 2013, §3.2).
    """
    information, length = (sizes / sizes.min()).log(), len(sizes) // parts
    groups: list[list[int]] = [[] for _ in range(parts)]
    for direction in sizes.argsort(descending=True).tolist():  # each to the part that has the least so far
        unfilled = [group for group in groups if len(group) < length]
        min(unfilled, key=lambda group: float(information[group].sum())).append(direction)
    return [direction for group in groups for direction in group]


def _distortion(vectors: Tensor, parts: int, basis: Tensor, start: Tensor | None, weights: Tensor) -> float:
    """The squared error of vectors (n, d) after a few steps of k-means, weighted by `weights` (d, d)."""
    turned = in_basis(vectors, basis)
    centroids = _k_means(turned, parts, TRIAL_ITERATIONS, start)
    nearest = centroids[torch.arange(parts), _nearest(centroids, turned).long()]  # (n, m, d / m)
    return float(((turned - nearest.flatten(1)) @ basis.float().T @ weights).square().sum())


def _k_means(vectors: Tensor, parts: int, iterations: int, start: Tensor | None) -> Tensor:
    """Centroids of all parts, (m, 256, d / m), from `start` or from some of the vectors (n, d).

    faiss finds the nearest centroids, which is the costly part. Its own k-means takes eight times as long and ends with
    larger errors on vectors with many zeros: it replaces an unused centroid by half of another, and we by the vector
    with the largest error.
    """
    split = vectors.reshape(len(vectors), parts, -1)  # (n, m, d / m)
    first = torch.randperm(len(vectors), generator=generator(0, "codebook"))[:CENTROIDS]
    centroids = split[first].transpose(0, 1) if start is None else start.float()
    for _ in range(iterations):
        centroids = _improved(centroids, split, _nearest(centroids, vectors).long())
    return centroids


def _nearest(centroids: Tensor, vectors: Tensor) -> Tensor:
    """The index of the nearest centroid (m, 256, d / m) to each part of vectors (n, d): uint8 (n, m)."""
    parts, _, length = centroids.shape
    faiss = import_faiss()
    quantiser = faiss.ProductQuantizer(parts * length, parts, 8)
    faiss.copy_array_to_vector(centroids.flatten().numpy(), quantiser.centroids)
    return torch.from_numpy(quantiser.compute_codes(vectors.numpy()))


def _improved(centroids: Tensor, split: Tensor, codes: Tensor) -> Tensor:
    """The mean of the parts (n, m, d / m) that are nearest to each centroid (m, 256, d / m)."""
    parts, _, length = centroids.shape
    places = (codes + CENTROIDS * torch.arange(parts)).flatten()  # (n m,): of each part's centroid among all
    sums = torch.zeros(parts * CENTROIDS, length, dtype=torch.float64)
    sums.index_add_(0, places, split.reshape(-1, length).double())
    counts = torch.bincount(places, minlength=parts * CENTROIDS)
    means = (sums / counts.clamp(min=1)[:, None]).float().reshape_as(centroids)
    unused = (counts == 0).reshape(parts, CENTROIDS)
    for part in unused.any(dim=1).nonzero().squeeze(1).tolist():
        errors = (split[:, part] - means[part, codes[:, part]]).square().sum(dim=1)  # (n,)
        idle = unused[part].nonzero().squeeze(1)
        means[part, idle] = split[errors.argsort(descending=True, stable=True)[: len(idle)], part]
    return means


def import_faiss() -> Any:
    """The package faiss, or an error that says how to install it."""
    try:
        import faiss
    except ImportError as error:
        raise not_installed("To store vectors by product quantisation (the codec pq), faiss-cpu", "compress") from error
    return faiss
