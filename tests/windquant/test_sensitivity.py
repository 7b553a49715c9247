import pytest
import torch

from windquant.grids import WIDTHS
from windquant.quantize import quantize_matrix
from windquant.sensitivity import KAPPA, SensitivityConfig, distortions


def problem(rows=10, columns=40):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, columns, generator=g)
    return torch.randn(rows, columns, generator=g), x.T @ x / 300, torch.rand(rows, generator=g)


def test_a_unit_costs_half_its_fisher_weighted_error():
    """1/2 sum_r g_r (e^T H e + kappa (e^T H w)^2 / w^T H w) in float64, of exactly what `quantize` stores; 40 columns in
    units of 16, 16 and 8."""
    w, H, g = problem()
    found = distortions(w, H, g, 16)
    for j, bits in enumerate(WIDTHS):
        e = (w - quantize_matrix(w, H, [bits] * 3, 16)[1]).double()
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


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_is_named(which):
    tensors = list(problem())
    tensors[which] = torch.full_like(tensors[which], float("nan"))
    with pytest.raises(ValueError, match=["weights", "input second moments", "Fisher weights"][which]):
        distortions(*tensors, 16)


def test_narrow_chunks_are_refused():
    with pytest.raises(ValueError, match="chunk_size 4 is too narrow"):
        SensitivityConfig(chunk_size=4)
