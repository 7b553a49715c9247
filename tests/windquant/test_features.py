import pytest
import torch

from windquant.features import features


def test_features_are_those_of_each_unit():
    w, a = torch.randn(50, 40, dtype=torch.float64), torch.rand(40, dtype=torch.float64) + 0.5
    w[3, 35] = 40.0
    first, last = features(w, a, 32)
    assert first[0] == pytest.approx(float(w[:, :32].abs().mean().log10()))
    assert last[1] == pytest.approx(float(w[:, 32:].var(correction=0).log10()))
    assert first[2] == pytest.approx(float((w[:, :32].abs() < 0.1 * w[:, :32].abs().mean()).double().mean()))
    assert last[3] == pytest.approx(1 / 400)
    assert last[5] == pytest.approx(float((a[32:].amax() / a[32:].mean()).log10()))
