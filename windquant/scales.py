"""Local fitting of scales, and their storage in eight bits.

A row of a unit has one scale s. It is fitted to the unit's own inputs: s minimises (w - q(s))^T H (w - q(s)), where
H = E[x x^T] is the unit's block of the input second moments. WINDQuant fits "locally, unit by unit" (arXiv 2605.26660);
the search is ours: a geometric grid of multiples of the papers' starting value, then the closed form for fixed codes,
s = q^T H w / q^T H q, twice.

The least-squares scale shrinks the layer's output: w^T H q(s) = rho w^T H w with rho about 0.9 at 2 bits, alike in every
layer, and shrinkage compounds with depth where rounding noise averages out. The stored scale is therefore s / rho^gamma,
for codes chosen at s. gamma = 1 removes the bias but lets the noise grow. Measured on SmolLM2-135M at 2.25 effective bits,
lagrangian plan, nats a token on held-out text: gamma 0: 5.862, 0.25: 5.634, 0.4: 5.649, 0.6: 5.782, 1: 6.610.

Storage is ours too. A float16 scale for 64 columns costs 0.25 bit a weight, an eighth of a 2-bit budget; an eight-bit
logarithmic scale costs half. Codes are rounded to the *stored* scale, so coarser scales lose almost nothing.

Notation: w (units, rows, columns); H (units, columns, columns); s (units, rows, 1).
"""

import torch
from torch import Tensor

from windquant.errors import InputError
from windquant.grids import Grid, encode, level, start_scale

SEARCH = tuple(0.25 * (1.1 / 0.25) ** (i / 13) for i in range(14))
GAMMA = 0.3
OCTAVES = 12
"""Scales of a unit span at most a factor 2^12: 254 steps of at most 3.3 %, stored to 1.7 %."""
SCALE_BYTES = 1
_STEPS = torch.arange(-1.0, 255.0)
RANGE_BYTES = 4
"""Two float16 a unit: the logarithm of the smallest scale, and the step between two codes."""


def quadratic(e: Tensor, H: Tensor) -> Tensor:
    """e^T H e of every row: (units, rows, columns), (units, columns, columns) -> (units, rows)."""
    return torch.einsum("urc,urc->ur", e @ H, e)


def fit(w: Tensor, H: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scale s to choose codes at, and the factor rho^-gamma (1 to 1.5) to store it with; both (units, rows, 1).

    s minimises the H-weighted rounding error of each row of each unit. Rows of zeros get scale 0; where the inputs are
    dead (q^T H q = 0) the papers' starting value stands.
    """
    s = start = start_scale(w, grid)
    Hw = w @ H
    wHw = (w * Hw).sum(-1, keepdim=True)

    def evaluate(s: Tensor) -> tuple[Tensor, Tensor]:
        """Error at s, and the best scale for the codes that s gives. Both follow from q^T H q and q^T H w."""
        q = level(encode(w, s, grid), grid, w.dtype)
        qHq = ((q @ H) * q).sum(-1, keepdim=True)
        qHw = (q * Hw).sum(-1, keepdim=True)
        error = wHw - 2 * s * qHw + s * s * qHq
        return error, torch.where((qHq > 0) & (qHw > 0), qHw / qHq, s)

    best, refit = evaluate(s)
    for t in SEARCH if grid.bits > 1 else ():
        error, candidate = evaluate(start * t)
        better = error < best
        s, refit, best = _choose(better, (start * t, candidate, error), (s, refit, best))
    for _ in range(2):
        error, candidate = evaluate(refit)
        better = error < best
        s, refit, best = _choose(better, (refit, candidate, error), (s, refit, best))
    qHw = (level(encode(w, s, grid), grid, w.dtype) * Hw).sum(-1, keepdim=True)
    rho = torch.where(wHw > 0, s * qHw / wHw, 1.0)
    return s, rho.clamp(0.25, 1) ** -GAMMA


def _choose(where: Tensor, new: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> list[Tensor]:
    return [torch.where(where, n, o) for n, o in zip(new, old, strict=True)]


def to_log8(s: Tensor, margin: float = 0.0) -> tuple[Tensor, Tensor]:
    """Store scales: codes (units, rows) uint8 and range (units, 2) float16, `margin` octaves wider at both ends. Code 0 is
    the scale zero, 1..255 are `exp2(low + step * (code - 1))`. A scale below 2^-OCTAVES of its unit's largest becomes zero.

    Raises InputError when a scale is negative, NaN or infinite.
    """
    s = s.squeeze(-1).float()
    if not bool(torch.isfinite(s).all()) or bool((s < 0).any()):
        raise InputError("a fitted scale is negative, NaN or infinite: check the weights and activations of this matrix")
    # A row this far below the largest of its unit is nothing beside it; kept, it would coarsen all the others' scales.
    positive = s > s.amax(-1, keepdim=True) * 2.0**-OCTAVES
    log = torch.where(positive, s, 1.0).log2()
    low = torch.where(positive, log, float("inf")).amin(-1)
    high = torch.where(positive, log, float("-inf")).amax(-1)
    empty = ~positive.any(-1)
    low, high = low.masked_fill(empty, 0.0) - margin, high.masked_fill(empty, 0.0) + margin
    low16 = low.half()
    step16 = ((high - low16.float()).clamp_min(0) / 254).half()
    step = step16.float()[:, None]
    codes = ((log - low16.float()[:, None]) / torch.where(step > 0, step, float("inf"))).round().clamp(0, 254) + 1
    return torch.where(positive, codes, 0).to(torch.uint8), torch.stack([low16, step16], -1)


def from_log8(codes: Tensor, span: Tensor) -> Tensor:
    """Inverse of `to_log8` on its own outputs: (units, rows), (units, 2) -> scales (units, rows, 1), float32."""
    low, step = span.float().unsqueeze(-1).unbind(1)
    log = low + step * _STEPS.to(span.device)
    # Looked up, for exp2 rounds differently where a tensor's end leaves a vector register half full: of 256 numbers a unit,
    # and few enough for one thread, there is no such end, and a scale does not depend on where it stands.
    table = torch.cat([torch.exp2(part) for part in log.split(128)]) if len(log) else log
    table[:, 0] = 0
    return table.gather(1, codes.long()).unsqueeze(-1)
