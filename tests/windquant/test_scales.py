import pytest
import torch

from windquant import scales
from windquant.grids import GRIDS, decode, encode, start_scale

WIDTHS = [1, 1.58, 2, 3, 4, 8]


def problem(rows=16, columns=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(2, rows, columns, generator=g)
    x = torch.randn(2, 400, columns, generator=g) * torch.rand(columns, generator=g).add(0.1) * 3
    return w, x.mT @ x / 400


def error(w, H, s, grid):
    return scales.quadratic(w - decode(encode(w, s, grid), s, grid), H)


@pytest.mark.parametrize("bits", WIDTHS)
def test_fit_is_no_worse_than_the_papers_start(bits):
    w, H = problem()
    grid = GRIDS[bits]
    s, _ = scales.fit(w, H, grid)
    assert (error(w, H, s, grid) <= error(w, H, start_scale(w, grid), grid) * (1 + 1e-4)).all()


@pytest.mark.parametrize("bits", [1, 1.58, 2, 3])
def test_fit_comes_close_to_a_fine_search(bits):
    """Within 4 % of 400 scales tried one by one, in float64, for the mean of the rows.

    Not at 4 and 8 bits: there the error jumps with the luck of single roundings, and what a finer search finds is lost
    when the scale is stored in eight bits.
    """
    w, H = problem()
    grid, start = GRIDS[bits], start_scale(w, GRIDS[bits])
    fine = torch.stack([error(w.double(), H.double(), start.double() * t, grid) for t in torch.linspace(0.1, 1.5, 400)])
    fitted = error(w.double(), H.double(), scales.fit(w, H, grid)[0].double(), grid)
    assert fitted.mean() <= 1.04 * fine.amin(0).mean()


def test_one_bit_scale_has_the_closed_form():
    w, H = problem()
    q = torch.where(w >= 0, 1.0, -1.0)
    expected = ((q @ H) * w).sum(-1, keepdim=True) / ((q @ H) * q).sum(-1, keepdim=True)
    torch.testing.assert_close(scales.fit(w, H, GRIDS[1])[0], expected, rtol=1e-4, atol=0)


def test_factor_is_the_inverse_shrinkage_to_gamma():
    w, H = problem()
    grid = GRIDS[2]
    s, factor = scales.fit(w, H, grid)
    q = decode(encode(w, s, grid), s, grid)
    rho = ((q @ H) * w).sum(-1, keepdim=True) / ((w @ H) * w).sum(-1, keepdim=True)
    torch.testing.assert_close(factor, rho**-scales.GAMMA, rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_row_of_zeros_stays_zero(bits):
    w, H = problem()
    w[0, 3] = 0
    s, factor = scales.fit(w, H, GRIDS[bits])
    code, span = scales.to_log8(s * factor)
    assert scales.from_log8(code, span)[0, 3] == 0


@pytest.mark.parametrize("bits", WIDTHS)
def test_dead_inputs_leave_a_finite_scale(bits):
    w, H = problem()
    s, factor = scales.fit(w, torch.zeros_like(H), GRIDS[bits])
    assert torch.isfinite(s).all() and (s > 0).all() and torch.isfinite(factor).all()


def test_log8_is_within_half_a_step():
    """Scales that span a factor 2^d are kept to 2^(d/508), plus float16's own rounding of the range's ends."""
    s = torch.rand(5, 100, 1, generator=torch.Generator().manual_seed(0)) * 0.9 + 0.1
    ratio = (scales.from_log8(*scales.to_log8(s)) / s).log2().abs()
    assert ratio.max() < 3.4 / 508 + 0.004


def test_log8_keeps_what_it_stored():
    s = torch.rand(3, 50, 1, generator=torch.Generator().manual_seed(1)) + 0.01
    code, span = scales.to_log8(s)
    again, span_again = scales.to_log8(scales.from_log8(code, span))
    torch.testing.assert_close(scales.from_log8(again, span_again), scales.from_log8(code, span), rtol=0.01, atol=0)


def test_scales_close_together_are_kept_close():
    """Twelve-bit floats of the range's ends leave 2^-10 octaves; the steps between are as fine as the range is narrow."""
    s = torch.tensor([0.1234, 0.1236, 0.1240]).view(1, 3, 1)
    assert ((scales.from_log8(*scales.to_log8(s)) / s).log2().abs() < 0.0011).all()


def test_a_dead_row_does_not_coarsen_the_others():
    s = torch.rand(1, 50, 1, generator=torch.Generator().manual_seed(0)) * 0.02 + 0.01
    alone = scales.from_log8(*scales.to_log8(s))
    s_dead = torch.cat([s, torch.full((1, 1, 1), 1e-10)], 1)
    together = scales.from_log8(*scales.to_log8(s_dead))
    assert torch.equal(together[:, :-1], alone) and together[0, -1] == 0


def test_constant_scales_survive_log8():
    s = torch.full((2, 7, 1), 0.25)
    assert torch.equal(scales.from_log8(*scales.to_log8(s)), s)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_log8_refuses_scales_that_are_none(bad):
    with pytest.raises(ValueError, match="negative, NaN or infinite"):
        scales.to_log8(torch.tensor([[[bad], [1.0]]]))


def test_a_scale_does_not_depend_on_where_it_stands():
    """Vectorised exp2 rounds the end of a tensor otherwise than its middle; 37 rows have such an end."""
    codes, span = scales.to_log8(torch.rand(3, 37, 1) + 1e-3)
    together = scales.from_log8(codes, span)
    assert torch.equal(together, torch.cat([scales.from_log8(codes[i : i + 1], span[i : i + 1]) for i in range(3)]))
    assert torch.equal(together[:, 5:9], scales.from_log8(codes[:, 5:9], span))
