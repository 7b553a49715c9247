"""Packed codes to numbers, a run of units at a time: the one way from stored bytes to weights in a running model.

A *run* is consecutive units of a matrix that have one width and one shape. Codes become grid points by table: a byte is
looked up as all the points it stands for (at 3 bits, twelve bits at a time). A table's rows are gathered as single wide
numbers where torch has a type that wide: three times faster than row by row, measured on a CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from windquant.errors import InputError
from windquant.grids import BY_SYMBOL, Grid, level
from windquant.packing import unpack
from windquant.scales import from_log8
from windquant.units import columns_of

_WIDE = {4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Bytes of a table's row -> a type of that size, to gather a row as one number."""


@dataclass(frozen=True)
class Run:
    """Consecutive units of one width and shape (rows, width). codes: their slice of the packed bytes; scaled: of the rows
    of `scale` and `span`; columns: of the matrix."""

    grid: Grid
    units: int
    rows: int
    width: int
    codes: slice
    scaled: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.units, self.rows, self.width


def layout(rows: int, columns: int, chunk_size: int, symbols: str) -> tuple[Run, ...]:
    """The runs of a matrix whose i-th unit has the width of the letter symbols[i], from left to right.

    Raises InputError when there is not one known letter a unit.
    """
    widths = columns_of(columns, chunk_size)
    if len(symbols) != len(widths) or not set(symbols) <= set(BY_SYMBOL):
        raise InputError(f"plan '{symbols}' is not {len(widths)} of the letters {''.join(BY_SYMBOL)}")
    runs: list[Run] = []
    code = scaled = start = 0
    for symbol, width in zip(symbols, widths, strict=True):
        grid = BY_SYMBOL[symbol]
        ends = code + grid.code_bytes(rows * width), scaled + grid.has_scale, start + width
        if runs and (runs[-1].grid, runs[-1].width) == (grid, width):
            last = runs.pop()
            begins, units = (last.codes.start, last.scaled.start, last.columns.start), last.units + 1
        else:
            begins, units = (code, scaled, start), 1
        runs.append(Run(grid, units, rows, width, *(slice(a, b) for a, b in zip(begins, ends, strict=True))))
        code, scaled, start = ends
    return tuple(runs)


def shapes(runs: Sequence[Run]) -> dict[str, tuple[int, ...]]:
    """Of the tensors `codes`, `scale` and `span` that a matrix's runs imply."""
    last = runs[-1]
    return {"codes": (last.codes.stop,), "scale": (last.scaled.stop, last.rows), "span": (last.scaled.stop, 2)}


def points_(out: Tensor, codes: Tensor, run: Run, unit_step: bool = False) -> None:
    """Write a run's grid points, in units of its scales, into out (units, rows, width); at 16 bits the weights themselves.

    codes: the whole matrix's, (bytes,) uint8. unit_step: at 1.58 bits in units of two thirds of the scale, so that the
    points of every grid are exact in any float type. In float32 the points without it are exactly those of `grids.level`.
    """
    packed, grid = codes[run.codes], run.grid
    if grid.bits == 16:
        out.copy_(packed.clone().view(torch.float16).view(run.shape))
    elif grid.bits == 8:
        out.copy_(packed.view(run.shape)).add_(grid.offset)
    else:
        table = _table(grid, out.dtype, unit_step, out.device)
        index = _index12(packed) if grid.bits == 3 else packed.int()
        wide, whole = _WIDE.get(table.shape[1] * table.element_size()), len(index) * table.shape[1] == out.numel()
        if wide and whole and out.is_contiguous():
            torch.index_select(table.view(wide).flatten(), 0, index, out=out.view(-1, table.shape[1]).view(wide).flatten())
        else:
            found = table.index_select(0, index).view(run.units, -1)
            out.copy_(found[:, : run.rows * run.width].view(run.shape))


def row_codes(codes: Tensor, run: Run, rows: Tensor) -> Tensor:
    """The codes of some rows of a run, (units, len(rows), width) uint8; rows: (n,) int64. Of 4 and 8 bits only."""
    n = run.grid.codes_per_group
    position = rows[:, None] * run.width + torch.arange(run.width, device=rows.device)
    found = codes[run.codes].view(run.units, -1)[:, position // n]
    return found if n == 1 else (found >> (4 * (position % n)).to(torch.uint8)) & (run.grid.levels - 1)


def dequantize(codes: Tensor, scale: Tensor, span: Tensor, runs: Sequence[Run], dtype: torch.dtype) -> Tensor:
    """All weights (rows, columns): computed in float32, exactly `PackedMatrix.dequantize`, then rounded once to dtype."""
    s = from_log8(scale, span)
    out = torch.empty(runs[0].rows, runs[-1].columns.stop, dtype=dtype, device=codes.device)
    for run in runs:
        w = torch.empty(run.shape, device=codes.device)
        points_(w, codes, run)
        place_(out, w.mul_(s[run.scaled]) if run.grid.has_scale else w, run)
    return out


def place_(out: Tensor, w: Tensor, run: Run) -> None:
    """Put a run's weights (units, rows, width) where they belong in a matrix (rows, all columns)."""
    out[:, run.columns].unflatten(1, (run.units, run.width)).copy_(w.transpose(0, 1))


def multiply(x: Tensor, codes: Tensor, s: Tensor, runs: Sequence[Run]) -> Tensor:
    """x (tokens, columns) times the transposed matrix, (tokens, rows) float32, without its weights in float32: the grid
    points of all units are multiplied in the dtype of x, each unit's sums then with its scales. s: the scales (units with
    a scale, rows, 1), which are changed."""
    full = [run for run in runs if run.width == runs[0].width]
    out = _multiply_units(x, codes, s, full)
    if len(full) < len(runs):
        out = out + _multiply_units(x, codes, s, runs[-1:])
    return out.t()


def _multiply_units(x: Tensor, codes: Tensor, s: Tensor, runs: Sequence[Run]) -> Tensor:
    """The share of adjacent runs of one shape, (rows, tokens) float32."""
    units, (_, rows, width) = sum(run.units for run in runs), runs[0].shape
    w = torch.empty(units, rows, width, dtype=x.dtype, device=x.device)
    first = 0
    for run in runs:
        points_(w[first : first + run.units], codes, run, unit_step=True)
        first += run.units
    own = x[:, runs[0].columns.start : runs[-1].columns.stop].reshape(len(x), units, width)
    sums = torch.bmm(w, own.permute(1, 2, 0).contiguous()).float()
    return sums.mul_(_factors_(s, runs)).sum(0)


def _factors_(s: Tensor, runs: Sequence[Run]) -> Tensor:
    """What the sums of adjacent runs' points, written by `points_(..., unit_step=True)`, are to be multiplied with."""
    for run in runs:
        if run.grid.bits == 1.58:
            s[run.scaled].mul_(run.grid.step)
    if all(run.grid.has_scale for run in runs):
        return s[runs[0].scaled.start : runs[-1].scaled.stop]
    return torch.cat([s[run.scaled] if run.grid.has_scale else s.new_ones(run.units, run.rows, 1) for run in runs])


@cache
def _table(grid: Grid, dtype: torch.dtype, unit_step: bool, device: torch.device) -> Tensor:
    """Points of every byte of codes, (256, codes a byte); at 3 bits of every twelve bits, (4096, 4)."""
    if grid.bits == 3:
        i = torch.arange(4096)
        codes = torch.stack([(i >> (3 * k)) & 7 for k in range(4)], -1)
    else:
        codes = unpack(torch.arange(256, dtype=torch.uint8)[:, None], grid.codes_per_group, grid)
    values = codes.float() - 1 if unit_step and grid.bits == 1.58 else level(codes, grid)
    return values.to(device, dtype).contiguous()


def _index12(packed: Tensor) -> Tensor:
    """Every three bytes as two numbers of twelve bits."""
    a, b, c = packed.view(-1, 3).int().unbind(1)
    return torch.stack([a + ((b & 15) << 8), (b >> 4) + (c << 4)], 1).flatten()
