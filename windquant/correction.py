"""What true losses say of a distortion table: a few factors, common to a kind of matrix and a depth.

Arjona-Medina et al. (arXiv 1806.07857) redistribute an episode's return to its steps; here that is a linear model with
random effects. With X_nj = sum over the units of plan n of D f_j, the f_j features of a unit,

    loss_n = b + s sum_u D + sum_j delta_j X_nj + error,    delta ~ N(0, lambda sigma^2),  error ~ N(0, sigma^2)

s, of a predicted nat the part that comes true, is free; delta is what groups deviate from it. lambda maximises the
restricted likelihood (Patterson and Thompson 1971) times a prior, lognormal, that expects deviations of SPREAD s: where
losses say nothing of the groups, the table stands. The corrected table is D (s + sum_j delta_j f_j), in true nats.

Notation: D (units, widths); f (units, features); N plans, choices (N, units), losses (N,).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from windquant.units import Unit

LAMBDAS = tuple(10.0**e for e in torch.linspace(-6, 8, 57).tolist())
"""Tried for lambda, the features scaled to a root mean square of 1."""
SPREAD, SURE = 0.4, 0.7
"""Median of the prior for the deviations' size, of s, and the deviation of its logarithm: the factors by kind and depth that
a blind search found lay between 0.4 and 2.5."""
FACTORS = (0.2, 5.0)
"""Of s, what a corrected distortion may be at least and at most."""


def features(body: Sequence[Unit], depths: int) -> Tensor:
    """f, (units, kinds x depths) float64: kinds of matrix times tents over the depth, which add up to 1 for every unit.

    None of them is of a width: what true losses on rounded units say of widths is not so after error feedback and
    reconstruction (benchmarks/LOG.md).
    """
    kinds = list(dict.fromkeys(u.matrix.kind for u in body))
    last = max(max(u.matrix.block for u in body), 1)
    f = torch.zeros(len(body), len(kinds), depths, dtype=torch.float64)
    for i, u in enumerate(body):
        at = u.matrix.block / last * (depths - 1)
        low = min(int(at), max(depths - 2, 0))
        row = f[i, kinds.index(u.matrix.kind)]
        row[low] = 1 - (at - low)
        if depths > 1:
            row[low + 1] = at - low
    return f.flatten(1)


def correct(D: Tensor, f: Tensor, choices: Tensor, losses: Tensor) -> Tensor:
    """The corrected table (units, widths). As it is while there are fewer than four plans, or where losses fall as
    distortions rise."""
    D = D.double()
    if len(losses) < 4:
        return D
    chosen = D.gather(1, choices.T)
    X, total = chosen.T @ f, chosen.sum(0)
    fixed = torch.stack([torch.ones_like(total), total], 1)
    scale = (X - X.mean(0)).square().mean().sqrt().clamp_min(1e-300)
    s, delta = _fit(losses.double(), fixed, (X - X.mean(0)) / scale, float(scale))
    if not s > 0:
        return D
    factor = (f @ (delta / scale) / s + 1).clamp(*FACTORS)
    return s * D * factor[:, None]


def _fit(y: Tensor, fixed: Tensor, Z: Tensor, scale: float) -> tuple[float, Tensor]:
    """s, and scale delta, at the best lambda. Z: features over scale."""
    best, found = -float("inf"), (0.0, torch.zeros(Z.shape[1], dtype=y.dtype))
    K, n = Z @ Z.T, len(y) - fixed.shape[1]
    for value in LAMBDAS:
        L = torch.linalg.cholesky(torch.eye(len(y), dtype=y.dtype) + value * K)
        A, b = (torch.linalg.solve_triangular(L, t, upper=False) for t in (fixed, y[:, None]))
        beta = torch.linalg.lstsq(A, b).solution
        variance = (b - A @ beta).square().sum() / n
        determinants = L.diagonal().log().sum() + 0.5 * torch.logdet(A.T @ A)
        likelihood = -0.5 * n * variance.clamp_min(1e-300).log() - determinants
        size = (value * variance).sqrt() / scale / beta[1, 0].abs()
        likelihood -= 0.5 * ((size.clamp_min(1e-300) / SPREAD).log() / SURE).square()
        if likelihood > best:
            rest = torch.cholesky_solve(y[:, None] - fixed @ beta, L)
            best, found = float(likelihood), (float(beta[1]), value * (Z.T @ rest)[:, 0])
    return found
