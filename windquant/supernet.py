"""Units reconstructed under many plans at once, so that any plan can be composed of them without further work.

A search needs the true loss of hundreds of plans, and of plans as the engine will leave them: unit-wise rounding is 1.6 nats
from that and ranks plans otherwise. So every width of every unit has weights and scales of its own, learned as `reconstruct`
does, but in every step under a plan drawn at random; a unit learns at the width it was drawn at. Calibration activations run
through blocks composed at random, too, a fresh plan for every few windows. What plans are drawn, `Neighbourhood` says: those
that a search may ask for. Plans unlike them look worse than they are.

Eight bits are rounded to nearest, sixteen are the weights themselves. What is stored of a block is every matrix packed at
every width but 16, about 20 bits a weight; `Composed` cuts a plan's units out of it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from windquant import unpacking
from windquant.blocks import linears
from windquant.candidates import Candidates
from windquant.engine import Engine
from windquant.errors import about
from windquant.grids import GRIDS, WIDTHS
from windquant.quantize import PARTS, PackedMatrix, pack_matrix, quantize_matrix
from windquant.reconstruct import Latent, reconstruct
from windquant.salient import SALIENT_PARTS, Salient
from windquant.streams import FORWARD_WINDOWS, compute
from windquant.units import Unit, columns_of

STORED = tuple(b for b in WIDTHS if b < 16)
LEARNED = tuple(b for b in WIDTHS if b < 8)


@dataclass(frozen=True)
class Neighbourhood:
    """Plans drawn around the lagrangian ones between two prices: of a table that is wrong by `groups` (standard deviation of
    its logarithm, whole groups psi at a time) and by `units` (each by itself).

    D, B: as in `allocate`. psi: (units, groups). block: of every unit, (units,). prices: nats a byte, lowest and highest.
    """

    D: Tensor
    B: Tensor
    psi: Tensor
    block: Tensor
    prices: tuple[float, float]
    groups: float = 0.4
    units: float = 0.4

    def __call__(self, index: int, generator: torch.Generator) -> list[float]:
        """Widths of a block's units."""
        own = self.block == index
        psi, D, B = self.psi[own], self.D[own].double(), self.B[own].double()
        wrong = self.groups * psi @ torch.randn(psi.shape[1], generator=generator, dtype=torch.float64)
        wrong += self.units * torch.randn(len(psi), generator=generator, dtype=torch.float64)
        low, high = self.prices
        p = low * (high / low) ** float(torch.rand((), generator=generator))
        return [min(WIDTHS[c], STORED[-1]) for c in (D * wrong.exp()[:, None] + p * B).argmin(1).tolist()]


def tensors_of(packed: dict[str, dict[float, PackedMatrix]]) -> dict[str, Tensor]:
    """Of matrices at every width, by path and width, as `<path>.<letter>.<part>`; salient weights, the same at all widths,
    once, with the narrowest."""
    tensors = {}
    for name, widths in packed.items():
        for b, matrix in widths.items():
            parts = PARTS if b != STORED[0] else PARTS | SALIENT_PARTS
            tensors |= {f"{name}.{GRIDS[b].symbol}.{p}": t for p, t in matrix.tensors().items() if p in parts}
    return tensors


def rounded(w: Tensor, H: Tensor, chunk_size: int, salient: Salient | None) -> dict[float, PackedMatrix]:
    """A matrix (rows, columns) at every width, all its units rounded to nearest under moments H."""
    units = len(columns_of(w.shape[1], chunk_size))
    return {b: quantize_matrix(w, H, [b] * units, chunk_size, salient)[0] for b in STORED}


class Mixture:
    """All widths of a matrix, of which a plan picks one for every unit. Stands where `reconstruct` has a Latent."""

    def __init__(self, w: Tensor, H: Tensor, chunk_size: int, salient: Salient | None) -> None:
        self.units = len(columns_of(w.shape[1], chunk_size))
        self.latents = {b: Latent(w, H, [b] * self.units, chunk_size, salient) for b in STORED}
        self.chunk_size, self.salient, self.w = chunk_size, salient, self.latents[STORED[0]].w
        self.shape = w.shape
        self.pick([STORED[0]] * self.units)

    def pick(self, bits: Sequence[float]) -> None:
        places: dict[float, list[int]] = {}
        for u, b in enumerate(bits):
            places.setdefault(b, []).append(u)
        self.places = {b: torch.tensor(found) for b, found in places.items()}

    def quantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype, device=self.w.device)
        for b, places in self.places.items():
            part = self.latents[b].take(places)
            for columns, values in zip(self._columns(places), part.quantize(dtype).split(part.widths, 1), strict=True):
                out[:, columns] = values
        return out

    def learn_(self, gradient: Tensor, rate: float) -> None:
        for b, places in self.places.items():
            if b in LEARNED:
                part = self.latents[b].take(places)
                part.learn_(torch.cat([gradient[:, c] for c in self._columns(places)], 1), rate)
                self.latents[b].put_(places, part)

    def _columns(self, places: Tensor) -> list[slice]:
        return [slice(u * self.chunk_size, min((u + 1) * self.chunk_size, self.shape[1])) for u in places.tolist()]

    def packed(self) -> dict[float, PackedMatrix]:
        return {b: pack_matrix(latent.rounded(), self.chunk_size, self.salient)[0] for b, latent in self.latents.items()}


@dataclass(frozen=True, kw_only=True)
class Supernet(Engine):
    """An `Engine` whose `plan` is not one but all. `run` yields every block's matrices at every width, as `tensors_of` them.
    draw: a block's index -> the widths of its units in a plan at random."""

    draw: Callable[[int, torch.Generator], Sequence[float]]

    def keep(self, index: int, packed: Any) -> None:
        self.scratch.put(f"{self.name}-{index}", tensors_of(packed))

    def kept(self, index: int) -> Any:
        return self.scratch.get(f"{self.name}-{index}")

    def _block(self, index: int, x: Tensor, q: Tensor) -> Any:
        assert self.config is not None
        generator, mixtures = self._generator(index), {}
        with self.walk.block(index) as block:
            target, inputs = self._watch(index, block, x, q)
            for name, layer in linears(block).items():
                with about(self.walk.path(index, name)):
                    salient = self.protect(index, name, layer.weight)
                    mixtures[name] = Mixture(layer.weight, inputs.take(name), self.chunk_size, salient)
                layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)

            def batches() -> Iterator[tuple[Tensor, Tensor]]:
                assert self.config is not None
                for batch in self._batches(q, target, self.config.batch, generator):
                    self._pick(index, mixtures, generator)
                    yield batch

            with compute(self.walk.device):
                reconstruct(block, mixtures, batches(), lambda x: self.walk.run(index, block, x), self.config)
            out = torch.cat([
                self._composed(index, block, part, mixtures, generator) for part in q.split(FORWARD_WINDOWS)
            ])  # fmt: skip
            return {self.walk.path(index, name): m.packed() for name, m in mixtures.items()}, target, out

    def _composed(
        self, index: int, block: nn.Module, q: Tensor, mixtures: dict[str, Mixture], generator: torch.Generator
    ) -> Tensor:
        self._pick(index, mixtures, generator)
        for name, layer in linears(block).items():
            layer.weight = nn.Parameter(mixtures[name].quantize(), requires_grad=False)
        return self._forward(index, block, q, "the quantized model's")

    def _pick(self, index: int, mixtures: dict[str, Mixture], generator: torch.Generator) -> None:
        """One plan for all matrices of a block: they are drawn together, so that blocks are now narrow and now wide."""
        bits = iter(self.draw(index, generator))
        for m in mixtures.values():
            m.pick([next(bits) for _ in range(m.units)])


@dataclass
class Composed(Candidates):
    """Plans composed of what `Supernet` yields. tensors: of a block's index, read as needed (they may be mapped from a
    file)."""

    tensors: Callable[[int], dict[str, Tensor]]

    def write(self, bits: Sequence[float], changed: list[int]) -> None:
        block, tensors = -1, {}
        salient: dict[str, Salient | None] = {}
        for i in changed:
            unit, b = self.body[i], bits[i]
            m = unit.matrix
            if m.block != block:
                block, tensors = m.block, self.tensors(m.block)
            columns = slice(unit.first_column, unit.first_column + unit.columns)
            weight = self.layers[m.name].weight
            if b == 16:
                weight[:, columns] = self.original[m.name][:, columns].half().to(weight.dtype)
            else:
                weight[:, columns] = self._unit(tensors, unit, b).to(weight)
            if m.name not in salient:
                names = {p: f"{m.name}.{GRIDS[STORED[0]].symbol}.{p}" for p in SALIENT_PARTS}
                own = {p: tensors[name].to(weight.device) for p, name in names.items() if name in tensors}
                salient[m.name] = Salient.of(m.rows, m.columns, own)
        for name, kept in salient.items():
            if kept is not None:
                kept.place_(self.layers[name].weight)

    def _unit(self, tensors: dict[str, Tensor], unit: Unit, bits: float) -> Tensor:
        """A unit's weights at a width, float32; salient ones are not in place yet."""
        grid, m = GRIDS[bits], unit.matrix
        name, chunk = f"{m.name}.{grid.symbol}", self.chunks[m.name]
        u, size = unit.first_column // chunk, grid.code_bytes(m.rows * chunk)
        packed = tensors[f"{name}.codes"][u * size : u * size + grid.code_bytes(unit.weights)]
        runs = unpacking.layout(m.rows, unit.columns, unit.columns, grid.symbol)
        scale, span = (tensors[f"{name}.{part}"][u, None] for part in ("scale", "span"))
        return unpacking.dequantize(packed, scale, span, runs, torch.float32)
