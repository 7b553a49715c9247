import pytest
import torch

from windquant.grids import GRIDS, decode, encode, start_scale

SCALED = [g for g in GRIDS.values() if g.has_scale]
ONE = torch.ones(1, 1)


def rounded(w: torch.Tensor, bits: float) -> torch.Tensor:
    return decode(encode(w, ONE, GRIDS[bits]), ONE, GRIDS[bits])


@pytest.mark.parametrize("grid", SCALED, ids=lambda g: f"{g.bits:g}")
def test_number_of_levels(grid):
    """A literal reading of the printed SEQ formula gives one level too many at 1.58 and 2 bits."""
    w = torch.linspace(-300, 300, 200_001)[None]
    assert len(decode(encode(w, ONE, grid), ONE, grid).unique()) == grid.levels == {1.58: 3}.get(grid.bits, 2**grid.bits)


def test_levels_are_the_papers():
    w = torch.linspace(-2, 2, 4001)[None]
    assert rounded(w, 1).unique().tolist() == [-1, 1]
    assert rounded(w, 1.58).unique().tolist() == pytest.approx([-2 / 3, 0, 2 / 3])
    assert rounded(w, 2).unique().tolist() == [-0.75, -0.25, 0.25, 0.75]
    assert rounded(w * 10, 3).unique().tolist() == list(range(-4, 4))


@pytest.mark.parametrize(("bits", "k", "shift"), [(1.58, 1.5, 0.0), (2, 2.0, 0.5)])
def test_seq_agrees_with_the_papers_formula(bits, k, shift):
    w = torch.randn(1, 10_000, generator=torch.Generator().manual_seed(0))
    paper = (torch.round(w.clamp(-0.99, 0.99) * k - shift) + shift) / k
    torch.testing.assert_close(rounded(w, bits), paper, atol=1e-6, rtol=0)


def test_lsq_agrees_with_the_papers_formula():
    w = torch.randn(1, 10_000, generator=torch.Generator().manual_seed(0)) * 60
    for bits in (3, 4, 8):
        q = 2 ** (bits - 1)
        torch.testing.assert_close(rounded(w, bits), w.round().clamp(-q, q - 1), atol=0, rtol=0)


def test_zero_is_plus_s_at_one_bit():
    assert rounded(torch.tensor([[0.0, -0.0, -1e-12]]), 1).tolist() == [[1, 1, -1]]


@pytest.mark.parametrize("grid", SCALED, ids=lambda g: f"{g.bits:g}")
def test_zero_scale_gives_zero_weights(grid):
    w = torch.zeros(2, 8)
    assert decode(encode(w, torch.zeros(2, 1), grid), torch.zeros(2, 1), grid).abs().max() == 0


def test_starting_scales():
    w = torch.tensor([[1.0, -3.0, 2.0, 0.0]])
    expected = {1: 1.5, 1.58: 3, 2: 3, 3: 1, 4: 3 / 7, 8: 3 / 127}
    assert {b: start_scale(w, GRIDS[b]).item() for b in expected} == pytest.approx(expected)
