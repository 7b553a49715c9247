"""GPTQ (arXiv 2210.17323) as its own code runs it with `--act-order --static-groups`: asymmetric grids fixed beforehand by a
group's ends, columns in the order of their inputs' power, every column's error made good by those still to come. Because the
grids are fixed, nothing of the order is stored. Unlike `windquant.feedback` it fits no scales.

Notation: w (rows, columns); H (columns, columns) input second moments; U upper triangular, U^T U = H^-1 (damped).
"""

import torch
from torch import Tensor

from windquant.baselines.affine import AffineMatrix, encode, min_max, on_grid, spread
from windquant.feedback import factor

TOGETHER = 128
"""Columns whose errors are passed on among themselves one by one, and beyond them at once."""


def round_with_feedback(w: Tensor, H: Tensor, bits: int, group: int) -> AffineMatrix:
    """Round to nearest where H cannot be factored. Raises InputError on NaN or Inf in w or H."""
    scale, zero = min_max(w, bits, group)
    order = H.diagonal().argsort(descending=True, stable=True)
    U = factor(H[order][:, order]).U
    if U is None:
        return on_grid(w, scale, zero, bits, group)
    s, z = (spread(t, group, w.shape[1]).T[order].contiguous() for t in (scale, zero))
    codes = torch.empty(w.shape[::-1], dtype=torch.uint8, device=w.device)
    left = w.T[order].contiguous()  # a row here is a column of w
    for start in range(0, len(order), TOGETHER):
        now = slice(start, min(start + TOGETHER, len(order)))
        errors = torch.empty_like(left[now])
        for j in range(now.start, now.stop):
            codes[j] = encode(left[j], s[j], z[j], bits)
            error = errors[j - start] = (left[j] - s[j] * (codes[j] - z[j])) / U[j, j]
            left[j + 1 : now.stop] -= U[j, j + 1 : now.stop, None] * error
        left[now.stop :] -= U[now, now.stop :].T @ errors
    return AffineMatrix(bits, group, codes[order.argsort()].T.contiguous(), scale, zero)
