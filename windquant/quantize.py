"""A matrix under a plan: every unit rounded to its own width, and packed.

Round to nearest on locally fitted scales. What is stored is what is computed with: scales pass through their eight bits
before anything is computed with them, so the weights of a reloaded matrix equal those in memory bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windquant import scales
from windquant.errors import InputError
from windquant.grids import BY_SYMBOL, GRIDS, Grid, decode, encode
from windquant.packing import pack, unpack
from windquant.units import columns_of


@dataclass(frozen=True)
class RoundedUnits:
    """A stack of units at one width. values: codes uint8, or float16 weights at 16 bits, (units, rows, columns)."""

    grid: Grid
    values: Tensor
    scale: Tensor
    span: Tensor

    def weights(self) -> Tensor:
        """(units, rows, columns), float32."""
        if not self.grid.has_scale:
            return self.values.float()
        return decode(self.values, scales.from_log8(self.scale, self.span), self.grid)

    def packed(self) -> Tensor:
        """(units, bytes) uint8."""
        flat = self.values.flatten(1)
        return pack(flat, self.grid) if self.grid.has_scale else flat.contiguous().view(torch.uint8)


def round_units(w: Tensor, H: Tensor, bits: float) -> RoundedUnits:
    """Round a stack of units (units, rows, columns) to one width, scales fitted to H (units, columns, columns).

    Raises InputError when a weight kept at 16 bits overflows float16.
    """
    grid = GRIDS[bits]
    if not grid.has_scale:
        values = w.half()
        if not bool(torch.isfinite(values).all()):
            raise InputError(f"a weight of {w.abs().max():g} does not fit the 16-bit format (at most 65504)")
        nothing = w.new_zeros(len(w), 0)
        return RoundedUnits(grid, values, nothing.to(torch.uint8), nothing.half())
    s, factor = scales.fit(w, H, grid)
    code, span = scales.to_log8(s * factor)
    return RoundedUnits(grid, encode(w, scales.from_log8(code, span) / factor, grid), code, span)


@dataclass(frozen=True)
class PackedMatrix:
    """A quantized matrix as it lies in a checkpoint.

    symbols: one letter a unit (`Grid.symbol`), left to right. codes: (bytes,) uint8, unit after unit. scale: (units
    with a scale, rows) uint8 and span: (units with a scale, 2) float16, see `scales.to_log8`.
    """

    rows: int
    columns: int
    chunk_size: int
    symbols: str
    codes: Tensor
    scale: Tensor
    span: Tensor

    def __post_init__(self) -> None:
        expected = self.sizes()
        found = {"codes": tuple(self.codes.shape), "scale": tuple(self.scale.shape), "span": tuple(self.span.shape)}
        if found != expected:
            raise InputError(f"packed tensors {found} do not fit the plan, which asks for {expected}")

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the three tensors that the plan implies. Raises InputError when the plan has not one known letter
        a unit."""
        widths = columns_of(self.columns, self.chunk_size)
        if len(self.symbols) != len(widths) or not set(self.symbols) <= set(BY_SYMBOL):
            raise InputError(f"plan '{self.symbols}' is not {len(widths)} of the letters {''.join(BY_SYMBOL)}")
        grids = [BY_SYMBOL[s] for s in self.symbols]
        scaled = sum(g.has_scale for g in grids)
        code_bytes = sum(g.code_bytes(self.rows * c) for g, c in zip(grids, widths, strict=True))
        return {"codes": (code_bytes,), "scale": (scaled, self.rows), "span": (scaled, 2)}

    def dequantize(self) -> Tensor:
        """The weights, (rows, columns), float32."""
        w = torch.empty(self.rows, self.columns, device=self.codes.device)
        offset = scaled = start = 0
        for symbol, columns in zip(self.symbols, columns_of(self.columns, self.chunk_size), strict=True):
            grid = BY_SYMBOL[symbol]
            size = grid.code_bytes(self.rows * columns)
            blob = self.codes[offset : offset + size]
            if grid.has_scale:
                values = unpack(blob[None], self.rows * columns, grid).view(1, self.rows, columns)
                unit = RoundedUnits(grid, values, self.scale[scaled, None], self.span[scaled, None])
                scaled += 1
            else:
                values = blob.clone().view(torch.float16).view(1, self.rows, columns)
                unit = RoundedUnits(grid, values, self.scale[:0], self.span[:0])
            w[:, start : start + columns] = unit.weights()[0]
            offset, start = offset + size, start + columns
        return w


def quantize_matrix(w: Tensor, H: Tensor, bits: Sequence[float], chunk_size: int) -> tuple[PackedMatrix, Tensor]:
    """Round and pack a matrix (rows, columns) with input second moments H, the i-th unit at bits[i].

    Returns the packed matrix, and the rounded weights (rows, columns) as they were before packing. Units of one width
    and shape are handled together.
    """
    dense = torch.empty_like(w)
    widths = columns_of(w.shape[1], chunk_size)
    parts: list[tuple[Tensor, Tensor, Tensor]] = [(w, w, w)] * len(widths)
    for key in dict.fromkeys(zip(bits, widths, strict=True)):
        members = [i for i, pair in enumerate(zip(bits, widths, strict=True)) if pair == key]
        starts = [i * chunk_size for i in members]
        units = torch.stack([w[:, a : a + key[1]] for a in starts])
        moments = torch.stack([H[a : a + key[1], a : a + key[1]] for a in starts])
        rounded = round_units(units, moments, key[0])
        blobs, weights = rounded.packed(), rounded.weights()
        for j, i in enumerate(members):
            dense[:, starts[j] : starts[j] + key[1]] = weights[j]
            parts[i] = (blobs[j], rounded.scale[j], rounded.span[j])
    scaled = [p for p, b in zip(parts, bits, strict=True) if GRIDS[b].has_scale]
    packed = PackedMatrix(
        rows=w.shape[0],
        columns=w.shape[1],
        chunk_size=chunk_size,
        symbols="".join(GRIDS[b].symbol for b in bits),
        codes=torch.cat([p[0] for p in parts]),
        scale=torch.stack([p[1] for p in scaled]) if scaled else torch.empty(0, w.shape[0], dtype=torch.uint8),
        span=torch.stack([p[2] for p in scaled]) if scaled else torch.empty(0, 2, dtype=torch.float16),
    )
    return packed, dense
