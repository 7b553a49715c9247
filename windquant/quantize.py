"""A matrix under a plan: every unit rounded to its own width, and packed.

Round to nearest on locally fitted scales. What is stored is what is computed with: scales pass through their eight bits
before anything is computed with them, so the weights of a reloaded matrix equal those in memory bit for bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windquant import scales, unpacking
from windquant.errors import InputError
from windquant.grids import GRIDS, Grid, decode, encode, symbols
from windquant.packing import pack
from windquant.salient import Salient
from windquant.units import columns_of

PARTS = {"codes": "U8", "scale": "U8", "span": "F16"}
"""The tensors of a packed matrix, and their dtypes in a safetensors header."""


PIECE = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Weights to work on at once, by kind of device. On a CPU what is made on the way of them stays in the caches, and below
`memory.LARGE`, from where on every temporary tensor is a new piece of memory (benchmarks/LOG.md); small beside a block."""


@dataclass(frozen=True)
class RoundedUnits:
    """A stack of units at one width. values: codes uint8, or float16 weights at 16 bits, (units, rows, columns)."""

    grid: Grid
    values: Tensor
    scale: Tensor
    span: Tensor

    def scales(self) -> Tensor | None:
        """(units, rows, 1), float32; None at 16 bits."""
        return scales.from_log8(self.scale, self.span) if self.grid.has_scale else None

    def weights(self) -> Tensor:
        """(units, rows, columns), float32."""
        s = self.scales()
        return self.values.float() if s is None else decode(self.values, s, self.grid)

    def split(self) -> "list[RoundedUnits]":
        """One by one, each a stack of one unit."""
        return [RoundedUnits(self.grid, *(t[i : i + 1] for t in (self.values, self.scale, self.span)))
                for i in range(len(self.values))]  # fmt: skip

    def permuted(self, order: Tensor) -> "RoundedUnits":
        """With the columns in another order."""
        return RoundedUnits(self.grid, self.values[:, :, order], self.scale, self.span)

    def packed(self) -> Tensor:
        """(units, bytes) uint8."""
        flat = self.values.flatten(1)
        return pack(flat, self.grid) if self.grid.has_scale else flat.contiguous().view(torch.uint8)


def round_units(w: Tensor, H: Tensor, bits: float, free: Tensor | None = None) -> RoundedUnits:
    """Round a stack of units (units, rows, columns) to one width, scales fitted to H (units, columns, columns). free: of
    the shape of w, False where a weight is salient and does not count.

    Raises InputError as `half_units` does.
    """
    grid = GRIDS[bits]
    if not grid.has_scale:
        return half_units(w)
    s, factor = scales.fit(w, H, grid, free)
    code, span = scales.to_log8(s * factor)
    return RoundedUnits(grid, encode(w, scales.from_log8(code, span) / factor, grid), code, span)


def half_units(w: Tensor) -> RoundedUnits:
    """A stack of units (units, rows, columns) at 16 bits. Raises InputError when a weight overflows float16."""
    values = w.half()
    if not bool(torch.isfinite(values).all()):
        raise InputError(f"a weight of {w.abs().max():g} does not fit the 16-bit format (at most 65504)")
    nothing = w.new_zeros(len(w), 0)
    return RoundedUnits(GRIDS[16], values, nothing.to(torch.uint8), nothing.half())


@dataclass(frozen=True)
class PackedMatrix:
    """A quantized matrix as it lies in a checkpoint.

    symbols: one letter a unit (`Grid.symbol`), left to right. codes: (bytes,) uint8, unit after unit. scale: (units
    with a scale, rows) uint8 and span: (units with a scale, 2) float16, see `scales.to_log8`. salient: the weights that
    are kept in INT8; their codes mean nothing.
    """

    rows: int
    columns: int
    chunk_size: int
    symbols: str
    codes: Tensor
    scale: Tensor
    span: Tensor
    salient: Salient | None = None

    def __post_init__(self) -> None:
        expected = self.sizes()
        found = {"codes": tuple(self.codes.shape), "scale": tuple(self.scale.shape), "span": tuple(self.span.shape)}
        if found != expected:
            raise InputError(f"packed tensors {found} do not fit the plan, which asks for {expected}")

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the three tensors that the plan implies. Raises InputError when the plan has not one known letter
        a unit."""
        return unpacking.shapes(self.runs())

    def runs(self) -> tuple[unpacking.Run, ...]:
        return unpacking.layout(self.rows, self.columns, self.chunk_size, self.symbols)

    def tensors(self) -> dict[str, Tensor]:
        """Part -> tensor, as in a checkpoint: PARTS, and SALIENT_PARTS where there are any."""
        return {part: getattr(self, part) for part in PARTS} | (self.salient.tensors() if self.salient else {})

    @classmethod
    def of(cls, rows: int, columns: int, chunk_size: int, symbols: str, tensors: Mapping[str, Tensor]) -> "PackedMatrix":
        """Inverse of `tensors`. Raises InputError when their shapes do not fit."""
        own = (tensors[part] for part in PARTS)
        return cls(rows, columns, chunk_size, symbols, *own, salient=Salient.of(rows, columns, tensors))

    def dequantize(self) -> Tensor:
        """The weights, (rows, columns), float32."""
        w = unpacking.dequantize(self.codes, self.scale, self.span, self.runs(), torch.float32)
        if self.salient:
            self.salient.place_(w)
        return w


def together(weights: int, device: torch.device) -> int:
    """How many units of so many weights to work on at once."""
    return max(1, PIECE.get(device.type, PIECE["cuda"]) // weights)


@dataclass(frozen=True)
class Stack:
    """Units of a matrix that can be worked on together, being of one width and shape: their places in it, w (units, rows,
    columns of a unit), H (units, columns, columns), and which weights are to be rounded, of the shape of w; None: all."""

    members: list[int]
    w: Tensor
    H: Tensor
    grid: Grid
    free: Tensor | None


def stacks(w: Tensor, H: Tensor, bits: Sequence[float], chunk_size: int, salient: Salient | None = None) -> Iterator[Stack]:
    """All units of a matrix (rows, columns), in stacks of one width and shape, few enough for caches."""
    free = ~salient.mask() if salient else None
    pairs = list(zip(bits, columns_of(w.shape[1], chunk_size), strict=True))
    for b, columns in dict.fromkeys(pairs):
        places = torch.tensor([i for i, pair in enumerate(pairs) if pair == (b, columns)])
        for members in places.split(together(len(w) * columns, w.device)):
            slices = [slice(i * chunk_size, i * chunk_size + columns) for i in members.tolist()]
            own = None if free is None else torch.stack([free[:, c] for c in slices])
            units, moments = torch.stack([w[:, c] for c in slices]), torch.stack([H[c, c] for c in slices])
            yield Stack(members.tolist(), units, moments, GRIDS[b], own)


def quantize_matrix(
    w: Tensor, H: Tensor, bits: Sequence[float], chunk_size: int, salient: Salient | None = None
) -> tuple[PackedMatrix, Tensor]:
    """Round to nearest and pack a matrix (rows, columns) with input second moments H, the i-th unit at bits[i]. salient:
    the weights of w that are kept in INT8. Returns as `pack_matrix`."""
    units: dict[int, RoundedUnits] = {}
    for stack in stacks(w, H, bits, chunk_size, salient):
        units |= dict(zip(stack.members, round_units(stack.w, stack.H, stack.grid.bits, stack.free).split(), strict=True))
    return pack_matrix([units[i] for i in range(len(bits))], chunk_size, salient)


def pack_matrix(
    units: Sequence[RoundedUnits], chunk_size: int, salient: Salient | None = None
) -> tuple[PackedMatrix, Tensor]:
    """Pack a matrix from its rounded units (stacks of one), left to right, and its salient weights. Returns it packed, and
    its weights (rows, columns) as they were before."""
    dense = torch.cat([u.weights()[0] for u in units], 1)
    if salient:
        salient.place_(dense)
        free = (~salient.mask()).split([u.values.shape[-1] for u in units], 1)
        units = [replace(u, values=u.values * own) for u, own in zip(units, free, strict=True)]
    scaled = [u for u in units if u.grid.has_scale]
    rows, device = dense.shape[0], dense.device
    packed = PackedMatrix(
        rows=rows,
        columns=dense.shape[1],
        chunk_size=chunk_size,
        symbols=symbols([u.grid.bits for u in units]),
        codes=torch.cat([u.packed()[0] for u in units]),
        scale=torch.cat([u.scale for u in scaled]) if scaled else torch.empty(0, rows, dtype=torch.uint8, device=device),
        span=torch.cat([u.span for u in scaled]) if scaled else torch.empty(0, 2, dtype=torch.float16, device=device),
        salient=salient,
    )
    return packed, dense
