import pytest
import torch

from windquant.grids import WIDTHS
from windquant.quantize import quantize_matrix
from windquant.salient import Protection, protect
from windquant.sensitivity import KAPPA, SensitivityConfig, distortions


def problem(rows=10, columns=40):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, columns, generator=g)
    return torch.randn(rows, columns, generator=g), x.T @ x / 300, torch.rand(rows, generator=g)


@pytest.mark.parametrize("mode", ["none", "weights", "columns"])
def test_a_unit_costs_half_its_fisher_weighted_error(mode):
    """1/2 sum_r g_r (e^T H e + kappa (e^T H w)^2 / w^T H w) in float64, of exactly what `quantize` stores; 40 columns in
    units of 16, 16 and 8."""
    w, H, g = problem()
    salient = None if mode == "none" else protect(w, H.diagonal().sqrt(), Protection(mode, 0.05))
    found = distortions(w, H, g, 16, salient)
    for j, bits in enumerate(WIDTHS):
        e = (w - quantize_matrix(w, H, [bits] * 3, 16, salient)[1]).double()
        for i, cols in enumerate((slice(0, 16), slice(16, 32), slice(32, 40))):
            part, unit, moment = e[:, cols], w[:, cols].double(), H[cols, cols].double()
            expected = torch.tensor(0.0, dtype=torch.float64)
            for r in range(10):
                along = (part[r] @ moment @ unit[r]) ** 2 / (unit[r] @ moment @ unit[r])
                expected += 0.5 * g[r] * (part[r] @ moment @ part[r] + KAPPA * along)
            assert found[i, j].item() == pytest.approx(expected.item(), rel=2e-3, abs=1e-9)


def test_distortion_falls_with_the_width():
    w, H, g = problem(64, 64)
    assert (distortions(w, H, g, 64)[0].diff() < 0).all()


@pytest.mark.parametrize("mode", ["weights", "columns"])
def test_what_is_protected_costs_next_to_nothing(mode):
    """Outliers in one column: kept in INT8, the units cost what those of the matrix without them do."""
    w, H, g = problem()
    without = w.clone()
    without[:, 3] = 0
    w[:, 3] = 50 + torch.arange(10)
    salient = protect(w, torch.ones(40), Protection(mode, 0.025))
    kept, plain = (distortions(w, H, g, 16, s)[0, 2] for s in (salient, None))
    assert kept < 1.5 * distortions(without, H, g, 16)[0, 2] < 0.1 * plain


def test_an_unknown_protection_is_refused():
    with pytest.raises(ValueError, match="salient 'rows' is unknown"):
        SensitivityConfig(salient="rows")
    with pytest.raises(ValueError, match="salient_share 0.5 is not between"):
        SensitivityConfig(salient_share=0.5)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_is_named(which):
    tensors = list(problem())
    tensors[which] = torch.full_like(tensors[which], float("nan"))
    with pytest.raises(ValueError, match=["weights", "input second moments", "Fisher weights"][which]):
        distortions(*tensors, 16)


def test_narrow_chunks_are_refused():
    with pytest.raises(ValueError, match="chunk_size 4 is too narrow"):
        SensitivityConfig(chunk_size=4)
