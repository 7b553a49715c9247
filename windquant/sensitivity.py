"""The distortion table: what each unit costs at each width, in predicted nats a token.

Second order around the trained weights, with the Hessian factored as in K-FAC: for row r of y = W x the curvature is
g_r H, so that a change e_r of the row's weights in one unit costs 1/2 g_r e_r^T H e_r nats. e is what rounding leaves
after the scales were fitted, i.e. exactly what `quantize` will store. Errors of different units are taken as additive.

That holds for errors that are independent. Rounding also shrinks every output a little (see `scales`), all in one
direction, and what is coherent adds up in amplitude over the depth, not in power. The part of e along w, with
c = e^T H w / w^T H w, therefore counts 1 + kappa times:

    D = 1/2 sum_r g_r (e^T H e + kappa c^2 w^T H w)

kappa is a constant measured once, on SmolLM2-135M at 2.25 effective bits (benchmarks/LOG.md): held-out nats a token of
the lagrangian plan 5.706, 5.650, 5.617 at kappa 0, 5, 15; at 8 the predicted total also comes close to the true one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from windquant.errors import InputError
from windquant.grids import WIDTHS
from windquant.quantize import round_units
from windquant.salient import Held, Mode, Protection, Salient, protection
from windquant.scales import quadratic
from windquant.units import columns_of

KAPPA = 8.0


@dataclass(frozen=True)
class SensitivityConfig:
    """chunk_size: columns of a unit; None takes 256 for models of 1 B weights and more, 64 below. salient: what of every
    matrix is kept in INT8 whatever the plan, single `weights`, whole input `columns` or `none`; salient_share: how many."""

    chunk_size: int | None = None
    salient: Mode = "weights"
    salient_share: float = 0.005

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size < 8:
            raise InputError(f"chunk_size {self.chunk_size} is too narrow: a scale a row needs at least 8 columns")
        Protection("weights" if self.salient == "none" else self.salient, self.salient_share)

    @property
    def protection(self) -> Protection | None:
        return protection(self.salient, self.salient_share)


def split(w: Tensor, chunk_size: int) -> list[Tensor]:
    """(rows, columns) -> stacks of units (units, rows, chunk): all full chunks, then the narrower last one if any."""
    full = w.shape[1] // chunk_size * chunk_size
    parts = [w[:, :full].unflatten(1, (-1, chunk_size)).transpose(0, 1)] if full else []
    return parts + ([w[None, :, full:]] if full < w.shape[1] else [])


def split_moment(H: Tensor, chunk_size: int) -> list[Tensor]:
    """(columns, columns) -> the units' diagonal blocks, stacked as `split` stacks weights."""
    stacks: list[list[Tensor]] = [[], []]
    start = 0
    for columns in columns_of(H.shape[0], chunk_size):
        stacks[columns < chunk_size].append(H[start : start + columns, start : start + columns])
        start += columns
    return [torch.stack(s) for s in stacks if s]


def distortions(w: Tensor, H: Tensor, g: Tensor, chunk_size: int, salient: Salient | None = None) -> Tensor:
    """Predicted nats of every unit of a matrix at every width, float64, (units, len(WIDTHS)).

    w: (rows, columns). H: (columns, columns) input second moments. g: (rows,) Fisher weights.
    salient: the weights that are kept in INT8, whose error is counted too.
    Raises InputError on NaN or Inf in any of them.
    """
    for name, t in (("weights", w), ("input second moments", H), ("Fisher weights", g)):
        if not bool(torch.isfinite(t).all()):
            raise InputError(f"the {name} hold NaN or Inf")
    stacks = []
    held = Held.of(w, salient)
    parts = (split(w, chunk_size), split_moment(H, chunk_size), split(held.free, chunk_size), split(held.values, chunk_size))
    for units, moments, free, values in zip(*parts, strict=True):
        columns = []
        wHw = quadratic(units, moments).clamp_min(torch.finfo(torch.float32).tiny)
        for bits in WIDTHS:
            q = round_units(units, moments, bits, free if salient else None).weights()
            e = units - torch.where(free, q, values)
            eHe, eHw = quadratic(e, moments), torch.einsum("urc,urc->ur", e @ moments, units)
            error = eHe.clamp_min(0) + KAPPA * eHw.square() / wHw
            columns.append(0.5 * (error.double() @ g.double()))
        stacks.append(torch.stack(columns, -1))
    table = torch.cat(stacks)
    if not bool(torch.isfinite(table).all()):
        raise InputError("the distortions overflow: activations or gradients of this matrix are too large to be true")
    return table
