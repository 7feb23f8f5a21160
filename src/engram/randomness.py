"""Random numbers as a function of their purpose, independent of what ran before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, *purpose: object) -> int:
    """A 63-bit seed for one purpose, e.g. `derive(seed, "crop", task, epoch, batch)`."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: object) -> torch.Generator:
    """A CPU generator for one purpose. Drawing on the CPU makes every device see the same numbers."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


@contextmanager
def seeded(seed: int, *purpose: object) -> Iterator[None]:
    """Seed torch's global generators for one purpose (initial weights, dropout), and restore them afterwards.

    Generators of GPUs are not restored: nothing else here draws from them.
    """
    with torch.random.fork_rng(devices=[]):
        number = derive(seed, *purpose)
        torch.default_generator.manual_seed(number)  # not torch.manual_seed, which takes as long as a small step
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(number)
        yield
