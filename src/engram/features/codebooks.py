"""Codebooks of product quantisation: vectors are cut into parts, and of each part a few centroids are found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engram.errors import not_installed
from engram.network import parallel

CENTROIDS = 256  # of each part: as many as a byte tells apart
ITERATIONS = 15  # of k-means; 25, faiss's own choice, bring vectors 5 % nearer in almost twice the time
PER_CENTROID = 64  # vectors, at the most, that the centroids are found from
SEED = 0


def check_installed() -> None:
    """Refuse to go on without faiss."""
    _faiss()


def codebook_and_codes(vectors: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Centroids of each part, float16 (m, min(256, n), d / m), and which is the nearest, uint8 (n, m).

    It is a function of the vectors (n, d) alone. As many vectors as there are centroids, or fewer, are their own.
    """
    count, dimension = vectors.shape
    if count > CENTROIDS:
        return parallel.once(lambda: _found(vectors, parts))
    codebook = vectors.reshape(count, parts, dimension // parts).transpose(0, 1)  # (m, n, d / m)
    codes = torch.arange(count, dtype=torch.uint8)[:, None].expand(count, parts)
    return codebook.half().contiguous(), codes.contiguous()


def _found(vectors: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    faiss, points = _faiss(), vectors.contiguous().numpy()
    quantiser = faiss.ProductQuantizer(vectors.shape[1], parts, 8)
    clustering = quantiser.cp
    clustering.seed, clustering.niter, clustering.max_points_per_centroid = SEED, ITERATIONS, PER_CENTROID
    clustering.min_points_per_centroid = 1  # it would warn of fewer than 39 for each part anew
    quantiser.train(points)
    centroids = torch.from_numpy(faiss.vector_to_array(quantiser.centroids))
    codes = torch.from_numpy(quantiser.compute_codes(points))
    return centroids.reshape(parts, CENTROIDS, -1).half(), codes


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise not_installed("To keep vectors by product quantisation (the codec pq), faiss-cpu", "compress") from error
    return faiss
