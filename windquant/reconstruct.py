"""Block reconstruction: the roundings and scales of a whole decoder block, learned against the block's own output.

After SignRound (arXiv 2309.05516), over mixed plans and our seven grids: every weight may move by about half a step of
its grid and so be rounded the other way, every scale may move, and both follow the sign of the gradient of

    mean over tokens of || block(x'; Q(W)) - block(x; W) ||^2

with x' the inputs that the blocks already quantized produce and x those of the reference, so that a block also makes
good what went wrong before it. Rates fall linearly to zero. Rounding is straight-through; scales are computed with as
they will be stored, in eight bits, at every step. SignRound keeps an offset V beside each weight; here the weight itself
moves, in units of its step, which is the same and takes half the memory.

Notation, per matrix, a narrower last unit filled up with zeros: w (units, rows, columns of a unit); s (units, rows, 1)
scales; o = offset / step and d = s step of a unit's grid; y = w / d - o positions on the code axis;
c = clamp(round(y)) codes; Q(w) = d (c + o).
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windquant import scales
from windquant.blocks import linears
from windquant.errors import InputError
from windquant.grids import BY_SYMBOL, GRIDS, Grid
from windquant.quantize import PackedMatrix, RoundedUnits, half_units, stacks, together
from windquant.salient import Salient
from windquant.units import columns_of

INSIDE = 0.4
"""Of a step, how far from the middle of its cell a weight starts at most: one on the edge is rounded the other way by the
first gradient that comes, whatever that is worth. At 0.499 a few steps undo the reconstruction (benchmarks/LOG.md)."""
MARGIN = 0.5
"""Octaves that a unit's stored range of scales reaches beyond the fitted ones, for them to move in."""


@dataclass(frozen=True)
class ReconstructConfig:
    """steps: signed-gradient steps a block. batch: windows a step. rate: what a weight moves in the first step, in steps of
    its grid, half of it at 3 bits and more; None takes 1 / steps, with which it goes half a step in all. A scale moves as
    far as takes its grid's outermost level by a weight's move, at most `rate` octaves: moved alike on all grids, scales
    throw the levels of wide ones about (benchmarks/LOG.md)."""

    steps: int = 50
    batch: int = 4
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise InputError(f"steps {self.steps} and batch {self.batch} must be at least 1")
        if self.rate is not None and not 0 < self.rate <= 1:
            raise InputError(f"rate {self.rate:g} is not between 0 and 1")


class Latent:
    """What is learned of one matrix (rows, columns) under a plan: w, and the logarithms of its scales. Salient weights are
    held at their INT8 values. fixed: codes stay, and w are their levels, in units of their scales, but for held and
    16-bit weights; `learn_` and `gradients` are for others."""

    fixed = False

    def __init__(self, w: Tensor, H: Tensor, bits: Sequence[float], chunk_size: int, salient: Salient | None = None) -> None:
        if salient:
            values = w.clone(memory_format=torch.contiguous_format)
            salient.place_(values)
        self._of([GRIDS[b] for b in bits], values if salient else w, chunk_size, salient)
        s = torch.ones(*self.w.shape[:2], 1, device=w.device)
        for stack in stacks(w, H, bits, chunk_size, salient):
            if stack.grid.has_scale:
                s[stack.members] = scales.fit(stack.w, stack.H, stack.grid, stack.free)[0]
            else:
                half_units(stack.w)  # refuses now what float16 cannot hold
        codes, self.span = scales.to_log8(s, MARGIN)
        self.alive = codes > 0
        self.log = torch.where(self.alive, s.squeeze(-1), 1.0).log2()

    @classmethod
    def of_packed(cls, packed: PackedMatrix) -> "Latent":
        """Whose Q(w) is a packed matrix bit for bit: w are its weights, and scales move inside its stored range."""
        self = cls.__new__(cls)
        self._of([BY_SYMBOL[c] for c in packed.symbols], packed.dequantize(), packed.chunk_size, packed.salient)
        scaled = ~self.exact.flatten()
        codes, self.span = (t.new_zeros(len(scaled), t.shape[1]) for t in (packed.scale, packed.span))
        codes[scaled], self.span[scaled] = packed.scale, packed.span
        self.alive = codes > 0
        self.log = torch.where(self.alive, scales.from_log8(codes, self.span).squeeze(-1), 1.0).log2()
        return self

    def approach_(self, w: Tensor, inside: float = INSIDE) -> None:
        """Move the weights towards w (rows, columns), at most `inside` steps from the middles of their cells, so that codes
        stay what they are: from the middle a weight has half a step to go before training changes anything."""
        for columns, part in self.parts():
            d = part.d()
            c = part.codes(part.y(d))
            wanted = (part._units(w[:, columns]).contiguous() / torch.where(d > 0, d, float("inf"))).sub_(part.o)
            near = torch.minimum(torch.maximum(wanted, c - inside), c + inside).add_(part.o).mul_(d)
            free = (d > 0) & ~part.exact
            part.hold_(near)
            part.w.copy_(torch.where(free, near, part.w))

    def fix_(self) -> None:
        """From now on codes stay what they are, whatever becomes of their scales."""
        for _, part in self.parts():
            levels = part.codes(part.y(part.d())).mul_(part.step).add_(part.offset)
            part.hold_(levels)
            part.w.copy_(torch.where(part.exact, part.w, levels))
        self.fixed = True

    def _of(self, grids: list[Grid], w: Tensor, chunk_size: int, salient: Salient | None) -> None:
        self.grids, self.widths = grids, columns_of(w.shape[1], chunk_size)
        self.width = self.widths[0]
        self.w, self.held = self._units(w).contiguous(), None
        if salient:
            self.held = [unit.flatten().nonzero()[:, 0] for unit in self._units(salient.mask())]
        self.step, self.offset, self.o, self.top = (
            self._of_grids(f) for f in (lambda g: g.step, lambda g: g.offset, _o, lambda g: g.levels - 1)
        )
        self.exact = self._of_grids(lambda g: not g.has_scale).bool()
        self.move = self._of_grids(lambda g: 0.5 if g.levels > 4 else 1.0)
        outermost = torch.maximum(self.o.abs(), self.top + self.o)
        self.octaves = (self.move / (math.log(2) * outermost)).clamp_max(1)

    def _units(self, t: Tensor) -> Tensor:
        """(rows, columns) -> (units, rows, columns of a unit)."""
        missing = len(self.widths) * self.width - t.shape[1]
        t = nn.functional.pad(t, (0, missing)) if missing else t  # which copies
        return t.unflatten(1, (len(self.widths), -1)).transpose(0, 1)

    def _of_grids(self, value: Callable[[Grid], float]) -> Tensor:
        return torch.tensor([float(value(g)) for g in self.grids], device=self.w.device).view(-1, 1, 1)

    def codes_of_scales(self) -> Tensor:
        """(units, rows) uint8, as `scales.from_log8` reads them."""
        low, step = self.span.float().unsqueeze(-1).unbind(1)
        codes = ((self.log - low) / torch.where(step > 0, step, float("inf"))).round().clamp(0, 254) + 1
        return torch.where(self.alive, codes, 0).to(torch.uint8)

    def hold_(self, values: Tensor) -> None:
        """Give values (units, rows, columns of a unit) the held weights where they belong."""
        for of_unit, w, places in zip(values, self.w, self.held or (), strict=False):
            of_unit.view(-1)[places] = w.view(-1)[places]

    def spare_(self, values: Tensor) -> None:
        """Zero values (units, rows, columns of a unit), of gradients or noise, where weights are held."""
        for of_unit, places in zip(values, self.held or (), strict=False):
            of_unit.view(-1)[places] = 0

    def beyond(self, gradient: Tensor) -> Tensor:
        """Where a step against the gradient (units, rows) would take a scale out of its stored range, or further out."""
        low, step = self.span.float().unsqueeze(-1).unbind(1)
        return ((self.log >= low + 254 * step) & (gradient < 0)) | ((self.log <= low) & (gradient > 0))

    def d(self) -> Tensor:
        return scales.from_log8(self.codes_of_scales(), self.span) * self.step

    def y(self, d: Tensor) -> Tensor:
        d = self.step if self.fixed else d
        return (self.w / torch.where(d > 0, d, float("inf"))).sub_(self.o)

    def codes(self, y: Tensor) -> Tensor:
        c = y.round().clamp_min_(0)
        return torch.minimum(c, self.top, out=c)

    def parts(self) -> Iterator[tuple[slice, "Latent"]]:
        """The matrix a few units at a time: their columns, and a latent that shares this one's memory."""
        size = self._together()
        for start in range(0, len(self.widths), size):
            part = self.take(slice(start, start + size))
            first = start * self.width
            yield slice(first, first + sum(part.widths)), part

    def _together(self) -> int:
        return together(self.w[0].numel(), self.w.device)

    def take(self, places: slice | Tensor) -> "Latent":
        """Some units: of a slice in this one's memory, of places (n,) ascending copies."""
        part = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list) and isinstance(places, Tensor):
                setattr(part, name, [value[u] for u in places.tolist()])
            elif isinstance(value, Tensor | list):
                setattr(part, name, value[places])
        return part

    def put_(self, places: Tensor, part: "Latent") -> None:
        """Take back what units that `take` gave have learned."""
        self.w[places], self.log[places] = part.w, part.log

    def quantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Q(w), (rows, columns)."""
        out = torch.empty(self.w.shape[1], len(self.widths) * self.width, dtype=dtype, device=self.w.device)
        units = self._units(out)
        for part, q in zip(self.parts(), units.split(self._together()), strict=True):
            q.copy_(part[1].rounding())
        return out[:, : sum(self.widths)].contiguous()

    def rounding(self) -> Tensor:
        """Q(w), (units, rows, columns of a unit), as `grids.decode` computes it."""
        s = scales.from_log8(self.codes_of_scales(), self.span)
        levels = self.w if self.fixed else self.codes(self.y(s * self.step)).mul_(self.step).add_(self.offset)
        q = levels * s
        if self.exact.any():
            q = torch.where(self.exact, self.w.half().float(), q)
        self.hold_(q)
        return q

    def learn_(self, gradient: Tensor, rate: float) -> None:
        """One step against the sign of the gradient of Q(w), (rows, columns). rate: as ReconstructConfig's."""
        for columns, part in self.parts():
            part._learn_(gradient[:, columns], rate)

    def _learn_(self, gradient: Tensor, rate: float) -> None:
        d = self.d()
        inside, of_scale = self.gradients(self._units(gradient), self.y(d))
        self.log -= (rate * self.octaves * of_scale.sign()).squeeze(-1)
        self.w.addcmul_(inside.sign_(), (self.move * d).where(~self.exact, 0.0), value=-rate)

    def gradients(self, gradient: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Of w and of d, straight through the rounding, given the gradient of Q(w), (units, rows, columns). Where the grid
        reaches that of w is the same, elsewhere 0; that of d, (units, rows, 1), is LSQ's: c + o - w / d where the grid
        reaches, the grid's end elsewhere. y is spent."""
        G = torch.empty_like(y).copy_(gradient)
        self.spare_(G)
        c, inside = self.codes(y), torch.empty_like(G)
        for g, at, top, out in zip(G, y, self.top.flatten().tolist(), inside, strict=True):
            if top < 0:  # 16 bits reach everywhere
                out.copy_(g)
            else:
                torch.ops.aten.hardtanh_backward(g, at, -0.5, top + 0.5, grad_input=out)  # g where the grid reaches, or 0
        return inside, _sum(c.mul_(G)) + self.o * (_sum(G) - _sum(inside)) - _sum(y.mul_(inside))

    def along_levels(self, gradient: Tensor) -> Tensor:
        """Of fixed codes' scales (units, rows), given the gradient of Q(w), (units, rows, columns of a unit)."""
        each = torch.mul(gradient, self.w, out=torch.empty_like(self.w))
        self.spare_(each)
        return each.sum(-1)

    def rounded(self) -> list[RoundedUnits]:
        """The units as they are stored, left to right."""
        scale, c, out = self.codes_of_scales(), self.codes(self.y(self.d())), []
        for u, (grid, width) in enumerate(zip(self.grids, self.widths, strict=True)):
            if grid.has_scale:
                values = c[u, None, :, :width].to(torch.uint8)
                out.append(RoundedUnits(grid, values, scale[u, None], self.span[u, None]))
            else:
                out.append(half_units(self.w[u, None, :, :width]))
        return out


def _sum(t: Tensor) -> Tensor:
    return t.sum(-1, keepdim=True)


def _o(grid: Grid) -> float:
    return grid.offset / grid.step if grid.has_scale else 0.0


def reconstruct(
    block: nn.Module,
    latents: dict[str, Latent],
    batches: Iterable[tuple[Tensor, Tensor]],
    run: Callable[[Tensor], Tensor],
    config: ReconstructConfig,
) -> list[float]:
    """Learn the latents of a block's linear layers, in place; returns the loss of every step.

    batches: at least `config.steps` pairs (x', block(x; W)), both (windows, T, hidden). run: the block on such inputs.
    The block's own weights are replaced and must be set afterwards. Raises InputError when the loss is NaN or Inf.
    """
    layers, device = linears(block), next(iter(latents.values())).w.device.type
    rate, losses = config.rate or 1 / config.steps, []
    # In the dtype of the matrix products, lest autocast converts weights and gradients once more.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    for i, (x, target) in zip(range(config.steps), batches, strict=False):
        for name, latent in latents.items():
            layers[name].weight = nn.Parameter(latent.quantize(dtype))
            learn = _learner(latent, rate * (1 - i / config.steps))
            layers[name].weight.register_post_accumulate_grad_hook(learn)  # one gradient is in memory at a time
        loss = (run(x).float() - target).square().mean()
        if not bool(torch.isfinite(loss)):
            raise InputError(
                f"the block's output on the calibration text holds NaN or Inf in step {i} of its reconstruction"
            )
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def _learner(latent: Latent, rate: float) -> Callable[[Tensor], None]:
    def learn(weight: Tensor) -> None:
        assert weight.grad is not None
        latent.learn_(weight.grad, rate)
        weight.grad = None

    return learn
