"""Error feedback: the rounding error of a column is made good by the columns still to be rounded.

GPTQ (arXiv 2210.17323) over our grids and mixed plans: column after column, each one's error, through the Cholesky factor
of the inverse moments, is taken out of the columns still to come, inside the unit at once and beyond it unit by unit. When
a unit's turn comes its scales are fitted to the weights as they have become, under the moments that are left to it: what
later columns can make good does not count against it. Units come in the order of their inputs' power, and columns inside
them, too, so that what matters most is rounded before errors pile up; nothing of the order needs to be stored.

Notation: w (rows, columns); H (columns, columns) input second moments; U upper triangular, U^T U = H^-1. For a unit
with columns c, the columns before it done, what an error e costs after the best compensation to its right is e S e^T,
S = (U_cc^T U_cc)^-1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windquant import scales
from windquant.errors import InputError
from windquant.grids import GRIDS, decode, nearest
from windquant.quantize import RoundedUnits, half_units, round_units
from windquant.salient import Held, Salient

DAMP = (0.01, 0.1, 1.0)
"""Shares of the mean diagonal added to H, tried in this order until it factors. GPTQ's is the first."""


@dataclass(frozen=True)
class Factor:
    """U as in the module's notation, and the damping it took; None: H could not be factored at any."""

    U: Tensor | None
    damp: float


def factor(H: Tensor) -> Factor:
    """Factor damped moments (columns, columns). Channels that no input ever reached take no part. Raises InputError on
    NaN or Inf."""
    if not bool(torch.isfinite(H).all()):
        raise InputError("the input second moments hold NaN or Inf")
    diagonal = H.diagonal()
    mean = diagonal.mean()
    for damp in DAMP if mean > 0 else ():
        damped = H.clone()
        damped.diagonal().add_(damp * mean)
        L, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        U, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(L), upper=True)
        if not failed and bool(torch.isfinite(U).all()):
            return Factor(U, damp)
    return Factor(None, 0.0)


def order(H: Tensor, chunk_size: int) -> list[Tensor]:
    """Columns of every unit, the units and the columns inside them by falling diagonal of H (columns, columns)."""
    units = torch.arange(len(H), device=H.device).split(chunk_size)
    power = H.diagonal()
    units = sorted(units, key=lambda c: -float(power[c].sum()))
    return [c[power[c].argsort(descending=True, stable=True)] for c in units]


@dataclass(frozen=True)
class Moments:
    """Input second moments H (columns, columns), made ready for units of `chunk_size` columns: whatever widths these get.
    columns: as `order` gives them; factor: of H in that order."""

    H: Tensor
    chunk_size: int
    columns: list[Tensor]
    factor: Factor

    @classmethod
    def of(cls, H: Tensor, chunk_size: int) -> "Moments":
        """Raises InputError as `factor` does."""
        columns = order(H, chunk_size)
        permuted = torch.cat(columns)
        return cls(H, chunk_size, columns, factor(H[permuted][:, permuted]))


def round_with_feedback(
    w: Tensor, moments: Moments, bits: Sequence[float], salient: Salient | None = None
) -> list[RoundedUnits]:
    """Round a matrix (rows, columns) under a plan. Returns its units, left to right. Where H could not be factored every
    unit is rounded to nearest instead. salient: the weights that are kept in INT8; what columns before them would have them
    make good they pass on. Raises InputError as `round_units` does."""
    H, columns, U = moments.H, moments.columns, moments.factor.U
    permuted = torch.cat(columns)
    w, held = w[:, permuted], Held.of(w, salient)[permuted]
    units: dict[int, RoundedUnits] = {}
    start = 0
    for original in columns:
        u, c = int(original.min()) // moments.chunk_size, slice(start, start + len(original))
        free = held.free[None, :, c] if salient else None
        if U is None:
            unit = round_units(w[None, :, c], H[original][None, :, original], bits[u], free)
        else:
            unit, error = _round_unit(w[:, c], U[c, c], bits[u], held[c], free)
            w[:, c.stop :] -= error @ U[c, c.stop :]
        units[u] = unit.permuted(original.argsort())
        start = c.stop
    return [units[u] for u in range(len(columns))]


def _round_unit(w: Tensor, U: Tensor, bits: float, held: Held, free: Tensor | None) -> tuple[RoundedUnits, Tensor]:
    """One unit (rows, columns), and its columns' errors in the coordinates in which U passes them on."""
    grid = GRIDS[bits]
    if not grid.has_scale:
        unit = half_units(w[None])
        stored = torch.where(held.free, unit.weights()[0], held.values)
        return unit, torch.linalg.solve_triangular(U, w - stored, upper=True, left=False)
    S = torch.cholesky_inverse(U, upper=True)
    scale, span = scales.to_log8(scales.fit(w[None], S[None], grid, free)[0])
    s = scales.from_log8(scale, span)[0, :, 0]
    w, held = w.T.contiguous(), Held(held.free.T.contiguous(), held.values.T.contiguous())  # column after column in memory
    codes, error = torch.empty_like(w, dtype=torch.uint8), torch.empty_like(w)
    for j in range(len(w)):
        column = torch.addmv(w[j], error[:j].T, U[:j, j], alpha=-1)
        code = nearest(column, s, grid)
        codes[j] = code
        stored = torch.where(held.free[j], decode(code, s, grid), held.values[j])
        error[j] = (column - stored) / U[j, j]
    return RoundedUnits(grid, codes.T[None], scale, span), error.T
