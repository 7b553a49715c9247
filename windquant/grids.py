"""The seven weight grids of WINDQuant: what a width means, level by level.

Every grid with fewer than 16 bits is affine in its code, `value = s * (step * code + offset)`:

    bits   levels                       operator
    1      {-1, +1} s                   elastic binarization
    1.58   {-2/3, 0, +2/3} s            stretched elastic quantization (SEQ)
    2      {-3/4, -1/4, +1/4, +3/4} s   SEQ
    3,4,8  {-2^(b-1) .. 2^(b-1)-1} s    learned step size (LSQ)
    16     the value itself, as float16

Source: WINDQuant (arXiv 2605.26660) for the choice of operators; ParetoQ for SEQ, LSQ for the uniform grids.

Notation: w (..., columns) weights; s (..., 1) scale of a row of a unit; c codes, uint8, same shape as w.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """One width. `bits` is its name in plans; `symbol` its one letter in a checkpoint's plan string."""

    bits: float
    symbol: str
    levels: int
    step: float
    offset: float
    codes_per_group: int
    bytes_per_group: int

    def code_bytes(self, weights: int) -> int:
        """Bytes that `weights` packed codes take; a unit is padded to whole groups."""
        return -(-weights // self.codes_per_group) * self.bytes_per_group

    @property
    def has_scale(self) -> bool:
        return self.bits < 16


def _uniform(bits: int, symbol: str, codes: int, size: int) -> Grid:
    return Grid(bits, symbol, 2**bits, 1.0, -float(2 ** (bits - 1)), codes, size)


GRIDS: dict[float, Grid] = {
    g.bits: g
    for g in (
        Grid(1, "1", 2, 2.0, -1.0, 8, 1),
        Grid(1.58, "t", 3, 2 / 3, -2 / 3, 5, 1),
        Grid(2, "2", 4, 1 / 2, -3 / 4, 4, 1),
        _uniform(3, "3", 8, 3),
        _uniform(4, "4", 2, 1),
        _uniform(8, "8", 1, 1),
        Grid(16, "f", 0, 0.0, 0.0, 1, 2),
    )
}
WIDTHS: tuple[float, ...] = tuple(GRIDS)
BY_SYMBOL: dict[str, Grid] = {g.symbol: g for g in GRIDS.values()}


def symbols(bits: Iterable[float]) -> str:
    """A plan's widths as a checkpoint writes them, one letter a unit."""
    return "".join(GRIDS[b].symbol for b in bits)


def encode(w: Tensor, s: Tensor, grid: Grid) -> Tensor:
    """Nearest code of each weight on `s * grid` (of a zero scale any: `decode` gives zero). Returns uint8, shape of `w`."""
    return nearest(w, s, grid).to(torch.uint8)


def nearest(w: Tensor, s: Tensor, grid: Grid) -> Tensor:
    """As `encode`, in the dtype of w.

    At 1 bit zero belongs to +s: a bare sign() would open a third level.
    """
    if grid.bits == 1:
        return (w >= 0).to(w.dtype)
    x = w / s.clamp_min(torch.finfo(w.dtype).tiny)
    return x.sub_(grid.offset).div_(grid.step).round_().clamp_(0, grid.levels - 1)


def level(c: Tensor, grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """Grid points in units of the scale: `step * c + offset`."""
    return c.to(dtype, copy=True).mul_(grid.step).add_(grid.offset)


def decode(c: Tensor, s: Tensor, grid: Grid) -> Tensor:
    """Weights of the codes, `s * level(c)`, in the dtype of `s`."""
    return level(c, grid, s.dtype).mul_(s)


def start_scale(w: Tensor, grid: Grid) -> Tensor:
    """The papers' starting scales per row, shape (..., 1): mean |w|, max |w|, or max |w| / (2^(b-1) - 1)."""
    magnitude = w.abs()
    if grid.bits == 1:
        return magnitude.mean(-1, keepdim=True)
    top = magnitude.amax(-1, keepdim=True)
    return top if grid.bits < 3 else top / (grid.levels / 2 - 1)
