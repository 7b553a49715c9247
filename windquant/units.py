"""Units: the pieces of a model that get a width of their own.

A unit is `chunk_size` consecutive columns (input channels) of one weight matrix, all rows; the last unit of a matrix
may be narrower (WINDQuant, arXiv 2605.26660).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windquant.errors import InputError
from windquant.grids import GRIDS, WIDTHS
from windquant.scales import RANGE_BYTES, SCALE_BYTES

PLAN_BYTES = 1
"""A checkpoint names the width of a unit by one letter."""


@dataclass(frozen=True)
class Matrix:
    """One quantized matrix: `name` is its module path, `kind` the last part of it (`q_proj`, ...)."""

    name: str
    block: int
    rows: int
    columns: int

    @property
    def kind(self) -> str:
        return self.name.rsplit(".", 1)[-1]

    @property
    def weights(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Unit:
    """`columns` columns of `matrix` from `first_column` on."""

    matrix: Matrix
    first_column: int
    columns: int

    @property
    def weights(self) -> int:
        return self.matrix.rows * self.columns

    def size(self, bits: float) -> int:
        """Bytes stored at a width: packed codes, scales, their range, and the letter in the plan."""
        grid = GRIDS[bits]
        scales = self.matrix.rows * SCALE_BYTES + RANGE_BYTES if grid.has_scale else 0
        return grid.code_bytes(self.weights) + scales + PLAN_BYTES


def chunk_size_for(weights: int) -> int:
    """The paper's 256 columns from 1 B weights on; 64 below, where 256 leaves a narrow model three units a matrix."""
    return 256 if weights >= 1_000_000_000 else 64


def columns_of(columns: int, chunk_size: int) -> list[int]:
    """Widths of the chunks of `columns` columns: all `chunk_size` but perhaps the last."""
    return [min(chunk_size, columns - start) for start in range(0, columns, chunk_size)]


def cut(matrices: Iterable[Matrix], chunk_size: int) -> list[Unit]:
    """All units, matrix by matrix, columns from left to right."""
    return [
        Unit(m, i * chunk_size, columns) for m in matrices for i, columns in enumerate(columns_of(m.columns, chunk_size))
    ]


def sizes(units: Sequence[Unit]) -> Tensor:
    """Bytes of every unit at every width: (units, len(WIDTHS)), int64, columns ordered as WIDTHS."""
    return torch.tensor([[u.size(b) for b in WIDTHS] for u in units], dtype=torch.int64)


def weights_in(units: Sequence[Unit]) -> int:
    return sum(u.weights for u in units)


def effective_bits(size: int, weights: int) -> float:
    """All stored bytes of the quantized matrices x 8 / their weights."""
    return 8 * size / weights


def bits_range(units: Sequence[Unit], salient: int = 0) -> tuple[float, float]:
    """The floor and the ceiling of effective bits that these units can reach. salient: bytes that their matrices take
    whatever the plan."""
    table, weights = sizes(units), weights_in(units)
    # Of a very narrow unit 16 bits can take fewer bytes than 8 with a scale.
    ends = int(table.amin(1).sum()), int(table.amax(1).sum())
    return effective_bits(ends[0] + salient, weights), effective_bits(ends[1] + salient, weights)


def budget_bytes(target_bits: float, units: Sequence[Unit], salient: int = 0) -> int:
    """The bytes that `target_bits` effective bits leave to the units. salient: as in `bits_range`.

    Raises InputError when the target lies below the floor or above the ceiling.
    """
    floor, ceiling = bits_range(units, salient)
    counted = "scales and salient weights" if salient else "scales"
    if not floor <= target_bits <= ceiling:
        raise InputError(
            f"target_bits {target_bits:g} is out of reach: with this model and chunk size a plan takes between "
            f"{math.ceil(floor * 1e4) / 1e4:g} and {math.floor(ceiling * 1e4) / 1e4:g} effective bits "
            f"({counted} counted); choose a target inside that range or widen the chunks"
        )
    return math.floor(target_bits * weights_in(units) / 8) - salient
