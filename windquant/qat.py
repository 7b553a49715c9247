"""Quantization-aware training over a plan: linear layers that round their weights in every forward pass, unit by unit.

ParetoQ's quantizers and straight-through gradients (arXiv 2502.02631), and what WinQ (arXiv 2605.17471) adds:

    pull    every K steps W <- (1 - alpha) W + alpha Q(W), a proximal step, alpha = eta gamma / (1 + eta gamma);
            the optimizer's state stays;
            in a Hadamard basis W <- H^T ((1 - alpha) H W + alpha Q(H W)), with scales fitted there anew
    noise   gradients are taken at Q(W + U), U ~ N(0, sigma^2 I), with the same sigma on the scales (which is much for the
            small scales of 8 bits)

WinQ's public code computes alpha W + (1 - alpha) Q(W); ours follows the paper. The scales' gradient is LSQ's, times
1 / sqrt(n Q_p) with n the columns of a unit and Q_p its grid's outermost level in steps; it is taken to their logarithms,
which are what learns, so that one rate is right for the small scales of wide grids and the large ones of narrow grids.
Of fixed codes it is the plain derivative, the sum of levels times gradients: no weight is rounded then, and none is
straight-through.
Scales are rounded to their eight bits before anything is computed with them, straight through, so what is trained is what
is stored.

Nothing of the weights' size is kept for the backward pass but the weights: rounding, and the noise from its seed, are done
again. Notation as in `reconstruct`: w (units, rows, columns of a unit) latent weights, s (units, rows) scales, log their
logarithms to the base 2.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windquant import scales
from windquant.errors import InputError
from windquant.grids import decode, encode
from windquant.quantize import PackedMatrix, pack_matrix
from windquant.reconstruct import INSIDE, Latent

TINY = 2.0**-120
"""Scales stay above."""


class QuantizedLinear(nn.Module):
    """nn.Linear that multiplies with Q(w), started from a packed matrix: as long as nothing was learned, Q(w) is that
    matrix bit for bit. like: the reference's weights (rows, columns), towards which w starts, at most `inside` steps from
    the middle of its cell (`Latent.approach_`). Parameters `w` and `log`, of 16-bit units without a meaning for log;
    salient weights are held. sigma: of the noise in training mode. fixed: codes stay and scales alone are learned, as in the
    second phase of EfficientQAT (arXiv 2407.11062); like, noise and pulls then mean nothing."""

    def __init__(
        self,
        packed: PackedMatrix,
        bias: Tensor | None = None,
        like: Tensor | None = None,
        inside: float = INSIDE,
        fixed: bool = False,
    ) -> None:
        super().__init__()
        self.latent = Latent.of_packed(packed)
        if fixed:
            self.latent.fix_()
        elif like is not None:
            self.latent.approach_(like, inside)
        self.chunk_size, self.salient = packed.chunk_size, packed.salient
        self.in_features, self.out_features = packed.columns, packed.rows
        self.w = nn.Parameter(self.latent.w, requires_grad=not fixed)
        self.log = nn.Parameter(self.latent.log)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.sigma, self.seed = 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        noisy = self.sigma if self.training and not self.latent.fixed else 0.0
        if noisy:
            self.seed = int(torch.randint(2**62, ()))
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        return F.linear(x.to(dtype), _Round.apply(self.w, self.log, self, dtype, noisy, self.seed), self.bias)

    @property
    def weight(self) -> Tensor:
        """Q(w), (rows, columns): for code that looks at a layer's dtype, device or values."""
        with torch.no_grad():
            return self.view(self.w, self.log).quantize()

    @property
    def s(self) -> Tensor:
        """The scales, before they are rounded to their eight bits."""
        return self.log.detach().exp2()

    def view(self, w: Tensor, log: Tensor) -> Latent:
        """The latent with these weights and scales."""
        own = copy.copy(self.latent)
        own.w, own.log = w.detach(), log.detach()
        for name, value in vars(own).items():
            if isinstance(value, Tensor) and value.device != w.device:
                setattr(own, name, value.to(w.device))
        return own

    @torch.no_grad()
    def pull_to_grid_(self, alpha: float, rotated: bool = False) -> None:
        """w <- (1 - alpha) w + alpha Q(w): alpha 0 does nothing, alpha 1 puts the weights on the grid, where fixed ones are.
        rotated: the grid of the units' rows in a Hadamard basis. Raises InputError unless the units are a power of 2 wide,
        then."""
        if self.latent.fixed:
            return
        for _, part in self.view(self.w, self.log).parts():
            part.w.lerp_(_rounded_in_hadamard_basis(part) if rotated else part.rounding(), alpha)

    @torch.no_grad()
    def packed(self) -> PackedMatrix:
        """As a checkpoint holds it: the sizes are those of the matrix it was started from."""
        return pack_matrix(self.view(self.w, self.log).rounded(), self.chunk_size, self.salient)[0]


class _Round(torch.autograd.Function):
    """(w, log) -> Q(w + U), (rows, columns) in the dtype of the products."""

    @staticmethod
    def forward(
        ctx: Any, w: Tensor, log: Tensor, layer: QuantizedLinear, dtype: torch.dtype, sigma: float, seed: int
    ) -> Tensor:
        ctx.save_for_backward(w, log)
        ctx.layer, ctx.noise = layer, (sigma, seed)
        out = torch.empty(layer.out_features, len(w) * w.shape[2], dtype=dtype, device=w.device)
        for columns, part in _noisy(layer.view(w, log), sigma, seed):
            own = part.rounding().transpose(0, 1).flatten(1)
            out[:, columns.start : columns.start + own.shape[1]] = own
        return out[:, : layer.in_features].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        w, log = ctx.saved_tensors
        latent = ctx.layer.view(w, log)
        G = latent._units(gradients[0])
        of_w, of_log = None if latent.fixed else torch.empty_like(w), torch.empty_like(log)
        at = 0
        for _, part in _noisy(latent, *ctx.noise):
            own = slice(at, at := at + len(part.w))
            if of_w is None:
                of_s = part.along_levels(G[own])
            else:
                d = part.d()
                of_w[own], of_d = part.gradients(G[own], part.y(d))
                n = torch.tensor(part.widths, dtype=torch.float32, device=w.device)[:, None]
                outermost = torch.maximum(part.o.abs(), part.top + part.o).clamp_min(0.5)[..., 0]
                of_s = (of_d * part.step)[..., 0] / (n * outermost).sqrt()
            without = part.exact[..., 0] | ~part.alive  # 16 bits, and rows of zeros
            of_log[own] = (of_s * log[own].exp2() * math.log(2)).masked_fill_(without, 0.0)
            of_log[own].masked_fill_(part.beyond(of_log[own]), 0.0)
        return of_w, of_log, None, None, None, None


def _noisy(latent: Latent, sigma: float, seed: int) -> Iterator[tuple[slice, Latent]]:
    """A few units at a time, as copies with noise where sigma is above 0: the same for the same seed."""
    generator = torch.Generator(latent.w.device)
    for i, (columns, part) in enumerate(latent.parts()):
        if sigma > 0:
            generator.manual_seed((seed + i) % 2**63)
            noise = torch.empty_like(part.w).normal_(0, sigma, generator=generator)
            part.spare_(noise)
            part.w = noise.add_(part.w)
            s = torch.empty_like(part.log).normal_(0, sigma, generator=generator).add_(part.log.exp2())
            part.log = s.clamp_min(TINY).log2()
        yield columns, part


def hadamard(n: int) -> Tensor:
    """Sylvester's matrix, orthonormal, (n, n). Raises InputError unless n is a power of 2."""
    if n < 1 or n & (n - 1):
        raise InputError(f"a unit of {n} columns has no Hadamard basis: it takes a power of 2")
    H = torch.ones(1, 1)
    while len(H) < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H / math.sqrt(n)


def _rounded_in_hadamard_basis(part: Latent) -> Tensor:
    """H^T Q(H w), (units, rows, columns of a unit); salient weights and 16-bit units as they are."""
    out = part.w.clone()
    for unit, grid, width in zip(out, part.grids, part.widths, strict=True):
        if grid.has_scale:
            H = hadamard(width).to(unit)
            turned = unit[:, :width] @ H
            s, _ = scales.fit(turned[None], torch.eye(width, device=unit.device)[None], grid)
            unit[:, :width] = decode(encode(turned, s[0], grid), s[0], grid) @ H.T
    part.hold_(out)
    return out


def layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def learned(model: nn.Module) -> set[int]:
    """The ids of what quantized layers learn: the logarithms of their scales and, unless codes are fixed, their weights."""
    return {id(p) for layer in layers(model).values() for p in (layer.w, layer.log) if p.requires_grad}


def pull_to_grid_(model: nn.Module, alpha: float, rotated: bool = False) -> None:
    """WinQ's step for every quantized layer. Raises InputError unless 0 <= alpha <= 1."""
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha {alpha:g} is not between 0 and 1")
    for layer in layers(model).values():
        layer.pull_to_grid_(alpha, rotated)
