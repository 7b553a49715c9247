"""Salient weights: a small share of a matrix that is kept in INT8, whatever widths its units get.

WINDQuant (arXiv 2605.26660) protects the top 3 % by |weight| x activation scale. Here they are either single weights or
whole input columns. Each row has one scale for its protected weights, stored as those of units are; positions are coded by
`positions`. Both count as stored bytes: 3 % single weights take 8 + 7 bits each, columns little more than 8.

A protected weight has its INT8 value in place of what its unit's code stands for; the code is still there, so that units
keep their sizes, but is 0. Values do not depend on the plan: they are fixed before anything is rounded, and
rounding, error feedback and reconstruction see them as constants.

Notation: w (rows, columns); a (columns,) = E|x|; n protected weights or columns.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from windquant import positions, scales
from windquant.errors import InputError
from windquant.grids import GRIDS, decode, encode, level
from windquant.packing import DTYPES
from windquant.units import Matrix, Unit, columns_of

SALIENT_PARTS = {"salient_positions": "U8", "salient_codes": "U8", "salient_scale": "U8", "salient_span": "F16"}
"""The tensors of a matrix's protected weights, and their dtypes in a safetensors header."""
INT8 = GRIDS[8]
TOP = 124
"""The largest weight of a row in steps of its scale: a stored scale can be 1.7 % too small, and 127 must not be passed."""
SHARES = (1e-4, 0.1)
"""Below, positions would outgrow their code; above, INT8 is no longer an exception but a width to plan with."""

Mode = Literal["none", "weights", "columns"]


@dataclass(frozen=True)
class Protection:
    """mode: single `weights`, or whole input `columns`. share: of them, that are kept in INT8."""

    mode: Mode
    share: float

    def __post_init__(self) -> None:
        if self.mode not in ("weights", "columns"):
            raise InputError(f"salient '{self.mode}' is unknown; choose one of none, weights, columns")
        if not SHARES[0] <= self.share <= SHARES[1]:
            raise InputError(f"salient_share {self.share:g} is not between {SHARES[0]:g} and {SHARES[1]:g}")

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Of the tensors of SALIENT_PARTS, for a matrix of this shape. At least one weight or column is protected."""
        universe = columns if self.mode == "columns" else rows * columns
        n = max(1, round(self.share * universe))
        return _shapes(rows, universe, (rows, n) if self.mode == "columns" else (n,))

    def size(self, matrix: Matrix) -> int:
        """Bytes stored for a matrix."""
        return sum(
            DTYPES[SALIENT_PARTS[p]].itemsize * math.prod(s) for p, s in self.shapes(matrix.rows, matrix.columns).items()
        )


def _shapes(rows: int, universe: int, codes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    coded = (positions.size(codes[-1], universe),)
    return dict(zip(SALIENT_PARTS, (coded, codes, (1, rows), (1, 2)), strict=True))


def protection(mode: Mode, share: float) -> Protection | None:
    """As params, tables, plans and checkpoints say it: `none` is None. Raises InputError as `Protection` does."""
    return None if mode == "none" else Protection(mode, share)


def total_size(protection: Protection | None, units: Iterable[Unit]) -> int:
    """Bytes that protection takes of all the matrices that the units are of."""
    return sum(protection.size(m) for m in dict.fromkeys(u.matrix for u in units)) if protection else 0


@dataclass(frozen=True)
class Salient:
    """The protected weights of a matrix as they lie in a checkpoint. positions: coded, of flattened places or of columns.
    codes: (n,), or (rows, n) of columns, uint8 on the 8-bit grid. scale: (1, rows) uint8 and span: (1, 2) float16, see
    `scales.to_log8`. Raises InputError when the tensors' shapes do not belong together."""

    rows: int
    columns: int
    positions: Tensor
    codes: Tensor
    scale: Tensor
    span: Tensor

    def __post_init__(self) -> None:
        found = {part: tuple(t.shape) for part, t in self.tensors().items()}
        n = self.codes.shape[-1] if self.codes.ndim in (1, 2) else 0
        expected = _shapes(self.rows, self.universe, (self.rows, n) if self.by_column else (n,)) if n else None
        if found != expected or n > self.universe:
            raise InputError(f"salient tensors {found} do not fit a matrix of {self.rows} x {self.columns}")

    @classmethod
    def of(cls, rows: int, columns: int, tensors: Mapping[str, Tensor]) -> "Salient | None":
        """From the tensors of a packed matrix; None where none are of SALIENT_PARTS. Raises InputError when some are missing
        or do not fit."""
        missing = [part for part in SALIENT_PARTS if part not in tensors]
        if len(missing) == len(SALIENT_PARTS):
            return None
        if missing:
            raise InputError(f"of its salient weights {missing[0]} is missing")
        return cls(rows, columns, *(tensors[part] for part in SALIENT_PARTS))

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(SALIENT_PARTS, (self.positions, self.codes, self.scale, self.span), strict=True))

    @property
    def by_column(self) -> bool:
        return self.codes.ndim == 2

    @property
    def universe(self) -> int:
        return self.columns if self.by_column else self.rows * self.columns

    def index(self) -> Tensor:
        """Protected columns, or places in the flattened matrix: (n,) int64, ascending. Raises InputError when damaged."""
        return positions.decode(self.positions, self.codes.shape[-1], self.universe)

    def place_(self, w: Tensor) -> None:
        """Put the protected weights where they belong in a contiguous matrix (rows, columns)."""
        index, s = self.index(), scales.from_log8(self.scale, self.span)[0]
        if self.by_column:
            w[:, index] = decode(self.codes, s, INT8).to(w.dtype)
        else:
            w.view(-1)[index] = self.values(index // self.columns).to(w.dtype)

    def mask(self) -> Tensor:
        """(rows, columns) bool, True where protected."""
        out = torch.zeros(self.rows, self.columns, dtype=torch.bool, device=self.codes.device)
        (out.t() if self.by_column else out.view(-1))[self.index()] = True
        return out

    def counts(self, chunk_size: int) -> list[int]:
        """Protected weights in every unit."""
        index, units = self.index(), len(columns_of(self.columns, chunk_size))
        found = torch.bincount(index % self.columns // chunk_size, minlength=units)
        return (found * self.rows if self.by_column else found).tolist()

    def values(self, row: Tensor) -> Tensor:
        """Single protected weights, (n,) float32. row: theirs."""
        return decode(self.codes, scales.from_log8(self.scale, self.span)[0, row, 0], INT8)

    def multiply(self, x: Tensor, index: Tensor) -> Tensor:
        """x (tokens, columns) times the transposed matrix of the protected columns alone, (tokens, rows) float32. index:
        what `index` gives."""
        s = scales.from_log8(self.scale, self.span)[0, :, 0]
        return (x[:, index] @ level(self.codes, INT8, x.dtype).t()).float() * s


@dataclass(frozen=True)
class Held:
    """Weights (rows, columns) that are not rounded but held at given values. free: bool, False where held; values: zero
    where free."""

    free: Tensor
    values: Tensor

    def __getitem__(self, columns: Tensor | slice) -> "Held":
        return Held(self.free[:, columns], self.values[:, columns])

    @classmethod
    def of(cls, w: Tensor, salient: Salient | None) -> "Held":
        values = torch.zeros(w.shape, device=w.device)
        if salient is None:
            return cls(torch.ones_like(values, dtype=torch.bool), values)
        salient.place_(values)
        return cls(~salient.mask(), values)


def protect(w: Tensor, a: Tensor, protection: Protection) -> Salient:
    """Choose what to protect in w (rows, columns), by |w| a or, for columns, the sum of its squares; of equals the first.

    a: (columns,) activation scales E|x|. Raises InputError on NaN or Inf in either.
    """
    importance = w.abs() * a
    if not bool(torch.isfinite(importance).all()):
        raise InputError("the weights or the activation scales hold NaN or Inf")
    by_column = protection.mode == "columns"
    score = importance.square().sum(0) if by_column else importance.flatten()
    n = protection.shapes(*w.shape)["salient_codes"][-1]
    index = _largest(score, n)
    if by_column:
        chosen, row = w[:, index], slice(None)
        top = chosen.abs().amax(1)
    else:
        chosen, row = w.reshape(-1)[index], index // w.shape[1]
        top = w.new_zeros(len(w)).scatter_reduce(0, row, chosen.abs(), "amax")
    scale, span = scales.to_log8(top[None, :, None] / TOP)
    s = scales.from_log8(scale, span)[0]
    codes = encode(chosen, s if by_column else s[row, 0], INT8)
    return Salient(w.shape[0], w.shape[1], positions.encode(index, len(score)), codes, scale, span)


def _largest(score: Tensor, n: int) -> Tensor:
    """Places of the n largest, ascending."""
    least = score.topk(n).values[-1]
    chosen = score > least
    equal = (score == least).nonzero()[:, 0]
    chosen[equal[: n - int(chosen.sum())]] = True
    return chosen.nonzero()[:, 0]
