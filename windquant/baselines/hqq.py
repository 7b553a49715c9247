"""HQQ, half-quadratic quantization (Badri and Shaji, 2023): zero points that make few weights err, without any data.

With the scales of the min-max grid fixed, the zero point z minimises the l_p norm, p < 1, of the error e = w - s (c - z):
a split variable takes what the norm likes of the error, z what is left, in turns, while the weight beta of the split rises.

Notation: W (rows, groups, group); s, z (rows, groups, 1); c codes.
"""

import torch
from torch import Tensor

from windquant.baselines.affine import AffineMatrix, encode, grouped, min_max, on_grid

P, BETA, KAPPA, STEPS = 0.7, 10.0, 1.01, 20
"""The authors' own."""


def shrink(e: Tensor, beta: float, p: float = P) -> Tensor:
    """Their closed form near the minimum over x of |x|^p / p + beta / 2 (x - e)^2."""
    return e.sign() * (e.abs() - e.abs().clamp_min(1e-12).pow(p - 1) / beta).clamp_min(0)


def norm(e: Tensor, p: float = P) -> Tensor:
    """sum |e|^p over the last dimension, which stays."""
    return e.abs().pow(p).sum(-1, keepdim=True)


def half_quadratic(w: Tensor, bits: int, group: int) -> AffineMatrix:
    """Of a group's zero points, float16, the best that came by; each starts from the min-max grid's own, not rounded. Raises
    InputError as `min_max` does."""
    scale = min_max(w, bits, group)[0]
    W, s = grouped(w, group), scale.float()[..., None]
    z = (-W.amin(-1, keepdim=True).clamp_max(0) / s).half().float()
    best, least, beta = z, torch.full_like(z, float("inf")), BETA
    for _ in range(STEPS):
        c = encode(W, s, z, bits).float()
        e = W - s * (c - z)
        found = norm(e)
        best, least = torch.where(found < least, z, best), torch.minimum(found, least)
        z = (c - (W - shrink(e, beta)) / s).mean(-1, keepdim=True).half().float()
        beta *= KAPPA
    return on_grid(w, scale, best[..., 0].half(), bits, group)
