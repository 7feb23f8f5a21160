"""Codebooks of product quantisation: vectors are cut into parts, and of each part a few centroids are found."""

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


def installed() -> bool:
    """Whether there is faiss."""
    return find_spec("faiss") is not None


def check_installed() -> None:
    """Refuse to go on without faiss."""
    _faiss()


def codebook_and_codes(vectors: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Centroids of each part, float16 (m, min(256, n), d / m), and which is the nearest, uint8 (n, m).

    It is a function of the vectors (n, d) alone. As many vectors as there are centroids, or fewer, are their own.
    """
    count, dimension = vectors.shape
    if count > CENTROIDS:
        return parallel.once(lambda: _found(vectors.contiguous(), parts))
    codebook = vectors.reshape(count, parts, dimension // parts).transpose(0, 1)  # (m, n, d / m)
    codes = torch.arange(count, dtype=torch.uint8)[:, None].expand(count, parts)
    return codebook.half().contiguous(), codes.contiguous()


def _found(vectors: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """K-means of all parts at once.

    faiss finds the nearest centroids, which is the work. Its own k-means takes eight times as long, and ends further
    from vectors that have many zeros: there, a centroid that is nearest to none becomes half of another; here it goes
    to the worst served.
    """
    some = vectors[:: -(-len(vectors) // MOST)].contiguous()  # spread over all
    quantiser = _faiss().ProductQuantizer(vectors.shape[1], parts, 8)
    first = torch.randperm(len(some), generator=generator(0, "codebook"))[:CENTROIDS]
    centroids = _cut(some[first], parts).transpose(0, 1)  # (m, 256, d / m)
    for _ in range(ITERATIONS):
        centroids = _improved(centroids, _cut(some, parts), _nearest(quantiser, centroids, some).long())
    codebook = centroids.half()
    return codebook, _nearest(quantiser, codebook.float(), vectors)


def _cut(vectors: Tensor, parts: int) -> Tensor:
    return vectors.reshape(len(vectors), parts, -1)  # (n, m, d / m)


def _nearest(quantiser: Any, centroids: Tensor, vectors: Tensor) -> Tensor:
    """Which centroid is the nearest to each part, uint8 (n, m)."""
    _faiss().copy_array_to_vector(centroids.flatten().numpy(), quantiser.centroids)
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
