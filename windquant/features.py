"""What an allocation policy is told of a unit's weights and inputs: six numbers of WINDQuant's state (arXiv 2605.26660),
which the paper does not name. See `environment` for the rest."""

import torch
from torch import Tensor

from windquant.units import columns_of

FEATURES = ("log_mean", "log_variance", "sparsity", "outliers", "log_activation", "log_peak")
_TINY = 1e-12


def features(w: Tensor, a: Tensor, chunk_size: int) -> Tensor:
    """Of every unit of a matrix, (units, len(FEATURES)), float64: log10 of the mean |w|; log10 of the variance; the share
    of weights below a tenth of the mean |w|; the share above four standard deviations; log10 of the mean activation scale;
    log10 of its peak over its mean. w: (rows, columns). a: (columns,) = E|x|."""
    out, start = [], 0
    for width in columns_of(w.shape[1], chunk_size):
        unit, scale = w[:, start : start + width].double(), a[start : start + width].double()
        size = unit.abs()
        mean, std = size.mean(), unit.std(correction=0)
        out.append(torch.stack([
            mean.clamp_min(_TINY).log10(),
            std.square().clamp_min(_TINY).log10(),
            (size < 0.1 * mean).double().mean(),
            (size > 4 * std).double().mean(),
            scale.mean().clamp_min(_TINY).log10(),
            (scale.amax().clamp_min(_TINY) / scale.mean().clamp_min(_TINY)).log10(),
        ]))  # fmt: skip
        start += width
    return torch.stack(out)
