import math

import pytest
import torch

from windquant import positions


def chosen(n, universe, seed=0):
    return torch.randperm(universe, generator=torch.Generator().manual_seed(seed))[:n].sort().values


CASES = [(1, 1), (1, 2), (1, 5000), (7, 7), (3, 40), (17, 576), (100, 3333), (9953, 331_776), (40, 300_000)]


@pytest.mark.parametrize(("n", "universe"), CASES)
def test_decoding_gives_back_what_was_encoded_in_the_size_foretold(n, universe):
    index = chosen(n, universe)
    packed = positions.encode(index, universe)
    assert packed.dtype == torch.uint8 and packed.shape == (positions.size(n, universe),)
    assert torch.equal(positions.decode(packed, n, universe), index)


@pytest.mark.parametrize("end", [0, 1])
def test_the_ends_of_the_universe_have_room(end):
    index = torch.arange(50) + end * (12_345 - 50)
    assert torch.equal(positions.decode(positions.encode(index, 12_345), 50, 12_345), index)


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.005, 0.01, 0.03, 0.05, 0.1])
def test_it_takes_within_0_6_bit_of_the_entropy(share):
    universe = 1_000_000
    n = round(share * universe)
    entropy = -(math.log2(share) + (1 - share) / share * math.log2(1 - share))
    assert entropy < 8 * positions.size(n, universe) / n < entropy + 0.6


def test_damaged_bytes_are_refused():
    packed = positions.encode(chosen(30, 1000), 1000)
    for damaged in (torch.zeros_like(packed), torch.full_like(packed, 255)):
        with pytest.raises(
            ValueError, match="positions of salient weights are damaged: they do not list 30 numbers below 1000"
        ):
            positions.decode(damaged, 30, 1000)
