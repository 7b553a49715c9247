"""What the published methods store of a matrix: codes with a scale and a zero point a group of columns.

    w[r, c] = scale[r, g] * (code[r, c] - zero[r, g]) / column[c]          g = c // group

Scales are float16; zero points are codes and packed like them, or float16 where a method asks for fractions of a code (HQQ).
`column`, one float16 a column, is there for methods that scale inputs (AWQ) where nothing before the matrix can take it.
All of it counts: at 2 bits and 64 columns a group 2 + (16 + 2) / 64 = 2.281 bits a weight, 2.5 with float16 zero points.

Notation: w (rows, columns); W (rows, groups, group) its groups, a narrower last one filled up with its last column, which
changes neither ends nor codes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from windquant.errors import InputError
from windquant.grids import GRIDS
from windquant.packing import pack, unpack

BITS = (2, 3, 4)
"""Widths with integer codes that `packing` packs without waste."""


@dataclass(frozen=True)
class AffineMatrix:
    """codes: (rows, columns) uint8. scale: (rows, groups) float16. zero: the same shape, uint8 or float16. column:
    (columns,) float16, or None."""

    bits: int
    group: int
    codes: Tensor
    scale: Tensor
    zero: Tensor
    column: Tensor | None = None

    def dequantize(self) -> Tensor:
        """The weights, (rows, columns), float32."""
        scale, zero = (spread(t, self.group, self.codes.shape[1]) for t in (self.scale, self.zero))
        w = (self.codes.float() - zero).mul_(scale)
        return w if self.column is None else w.div_(self.column.float())

    def tensors(self) -> dict[str, Tensor]:
        """Part -> tensor, as in a file: codes and integer zero points packed."""
        parts = {"codes": _packed(self.codes, self.bits), "scale": self.scale, "zero": self.zero}
        if self.zero.dtype == torch.uint8:
            parts["zero"] = _packed(self.zero, self.bits)
        return parts if self.column is None else parts | {"column": self.column}

    @classmethod
    def of(cls, rows: int, columns: int, bits: int, group: int, parts: Mapping[str, Tensor]) -> "AffineMatrix":
        """Inverse of `tensors`. Raises InputError when their shapes do not fit."""
        groups = -(-columns // group)
        fits = parts["scale"].shape == (rows, groups) and parts["codes"].numel() == code_bytes(rows * columns, bits)
        packed = parts["zero"].dtype == torch.uint8
        if not fits or parts["zero"].numel() != (code_bytes(rows * groups, bits) if packed else rows * groups):
            raise InputError(f"stored parts do not fit a {rows} x {columns} matrix at {bits} bits, {group} columns a group")
        zero = _unpacked(parts["zero"], (rows, groups), bits) if packed else parts["zero"]
        codes = _unpacked(parts["codes"], (rows, columns), bits)
        return cls(bits, group, codes, parts["scale"], zero, parts.get("column"))


@dataclass(frozen=True)
class HalfVector:
    """A norm's weight that took a matrix's column scales: stored in float16, as norms are."""

    values: Tensor

    def dequantize(self) -> Tensor:
        return self.values.float()

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}


def code_bytes(codes: int, bits: int) -> int:
    return GRIDS[bits].code_bytes(codes)


def _packed(codes: Tensor, bits: int) -> Tensor:
    return pack(codes.flatten()[None], GRIDS[bits])[0]


def _unpacked(packed: Tensor, shape: tuple[int, int], bits: int) -> Tensor:
    return unpack(packed[None], math.prod(shape), GRIDS[bits])[0].view(shape)


def grouped(w: Tensor, group: int) -> Tensor:
    """w (rows, columns) -> W (rows, groups, group)."""
    columns = w.shape[1]
    at = torch.arange(-(-columns // group) * group, device=w.device).clamp_(max=columns - 1)
    return w[:, at].unflatten(1, (-1, group))


def spread(t: Tensor, group: int, columns: int) -> Tensor:
    """A value a group (rows, groups) -> a value a column (rows, columns), float32."""
    return t.float().repeat_interleave(group, 1)[:, :columns]


def min_max(w: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """The asymmetric grid from the smallest to the largest weight of a group, 0 among its points: scale float16 and zero
    uint8, (rows, groups). Raises InputError on NaN, Inf or what float16 cannot hold."""
    W = grouped(w, group)
    low, high = W.amin(-1).clamp_max(0), W.amax(-1).clamp_min(0)
    # A group of zeros, or one below float16's reach, gets its smallest number: every code then means (almost) nothing.
    scale = ((high - low) / (2**bits - 1)).clamp_min(2.0**-24).half()
    if not bool(torch.isfinite(scale).all()):
        raise InputError("a weight is NaN, infinite or too large for a float16 scale")
    zero = (-low / scale.float()).round().clamp_(0, 2**bits - 1)
    return scale, zero.to(torch.uint8)


def encode(w: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Nearest codes, uint8. scale, zero: float32 and of a shape that broadcasts to w's."""
    return (w / scale).add_(zero).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def on_grid(w: Tensor, scale: Tensor, zero: Tensor, bits: int, group: int) -> AffineMatrix:
    """Every weight rounded to nearest on given grids."""
    columns = w.shape[1]
    codes = encode(w, spread(scale, group, columns), spread(zero, group, columns), bits)
    return AffineMatrix(bits, group, codes, scale, zero)


def round_to_nearest(w: Tensor, bits: int, group: int) -> AffineMatrix:
    """RTN: w (rows, columns) on the min-max grids of its groups. Raises InputError as `min_max` does."""
    return on_grid(w, *min_max(w, bits, group), bits, group)
