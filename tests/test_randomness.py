"""Random numbers depend on what they are for and on nothing else."""

from __future__ import annotations

import itertools

import torch

from engram.randomness import derive, generator, seeded


def test_the_same_purpose_gives_the_same_numbers_whatever_ran_before() -> None:
    first = torch.rand(5, generator=generator(3, "crop", 1, 2))
    torch.rand(100, generator=generator(3, "crop", 1, 1))
    torch.manual_seed(17)
    assert torch.equal(torch.rand(5, generator=generator(3, "crop", 1, 2)), first)


def test_numbers_are_those_of_every_version_and_machine() -> None:
    # The first 8 bytes of `printf '0/order/1/2' | sha256sum`, without the lowest bit.
    assert derive(0, "order", 1, 2) == 0xBA1B1D88F05AECC2 >> 1


def test_other_purposes_give_other_numbers() -> None:
    purposes = [(0,), (1,), (0, "order"), (0, "crop"), (0, "order", 1), (0, "order", 1, 2), (0, "order", 12)]
    drawn = [torch.rand(4, generator=generator(*purpose)) for purpose in purposes]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))


def test_a_derived_seed_fits_in_63_bits() -> None:
    seeds = [derive(seed, "weights") for seed in range(200)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len(set(seeds)) == 200


def test_seeded_is_a_function_of_its_purpose_and_leaves_the_global_generator_as_it_was() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with seeded(0, "weights"):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(9)
    with seeded(0, "weights"):
        assert torch.equal(torch.rand(3), first)
    with seeded(1, "weights"):
        assert not torch.equal(torch.rand(3), first)


def test_seeded_restores_the_global_generator_after_an_error_too() -> None:
    before = torch.get_rng_state()
    try:
        with seeded(0, "weights"):
            torch.rand(3)
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.get_rng_state(), before)
