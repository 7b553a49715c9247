"""The spectrum of a loss's Hessian by stochastic Lanczos quadrature, for chosen parameters (WinQ, arXiv 2605.17471).

For a probe z of independent signs, m Lanczos steps from z / |z| give a tridiagonal T_m; its eigenvalues theta_i and the
squares tau_i^2 of their vectors' first components are the nodes and weights of a Gauss quadrature of the spectral density as
z sees it: moments up to 2m - 1 are exact (Golub and Meurant). Averaged over probes they estimate the density itself. Every
new vector is orthogonalised against all before it, twice: without that converged eigenvalues come again as ghosts.

The first moment of such a quadrature is z' H z / P, whatever m: times P and averaged over probes it is Hutchinson's estimate
of the trace, so no further products are spent on one.

Memory: m + 3 vectors of the parameters' size in float32, 4 P (m + 3) bytes for P parameters, beside the gradient's graph.
For a big model take the parameters of one block at a time.

Whose Hessian, for a model with quantized weights Q(W): that of the loss L as a function of the dense weights, taken at Q(W),
which is what the checkpoint computes with and where straight-through training takes its gradients. A pull to the grid moves
W and leaves Q(W) where it is, so it leaves this Hessian alone, too. It changes two others: the Hessian of L at the latent
weights W themselves; and what training sees of the one at Q(W), since a weight beyond its grid's end has no gradient, so
that its row and column are missing (`straight_through`), and a pull may bring it back. The paper's notebook differentiates
twice through the rounding and so sees the latter, and calls near zero what is below 1.5e-3.

What cannot be seen: a matrix whose inputs are n tokens has curvature in at most n directions of its columns, so with fewer
tokens than columns the rest of the spectrum is exactly zero for want of text; and m nodes do not tell apart what lies closer
together than about the m-th part of the spectrum's range, so a share near zero is mostly the weight of one node there, and
falls from all to nothing where the threshold comes below that node. `rms`, a moment, is exact for a probe whatever m.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from windquant.errors import InputError, above_zero

Matvec = Callable[[Tensor], Tensor]
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class HessianConfig:
    """probes, and Lanczos steps of each. near_zero: eigenvalues nearer to zero than this share of the largest magnitude
    count as flat directions."""

    probes: int = 4
    steps: int = 30
    near_zero: float = 1e-2

    def __post_init__(self) -> None:
        above_zero(self, "probes", "steps", "near_zero")


def hessian_product(loss: Callable[[], Tensor], parameters: Sequence[Tensor]) -> Matvec:
    """v -> H v, both flat (P,), by double backward. loss: computes the scalar loss from these very parameters, which require
    gradients, and must not change while the products are used. It is called once: a product goes back through the graph of
    its gradient, which stays in memory. Attention runs in the implementation that can be differentiated twice."""
    sizes = [p.numel() for p in parameters]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        # Unused is what belongs to an expert that no token calls.
        gradients = torch.autograd.grad(
            loss(), list(parameters), create_graph=True, allow_unused=True, materialize_grads=True
        )

    def product(v: Tensor) -> Tensor:
        parts = [part.view_as(p).to(p) for part, p in zip(v.split(sizes), parameters, strict=True)]
        curved = [(g, part) for g, part in zip(gradients, parts, strict=True) if g.requires_grad]
        if not curved:
            return torch.zeros_like(v)
        outputs, along = zip(*curved, strict=True)
        found = torch.autograd.grad(
            outputs, list(parameters), along, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return torch.cat([f.flatten() for f in found]).to(v)

    return product


def straight_through(product: Matvec, inside: Tensor) -> Matvec:
    """v -> D H D v, with D = diag(inside): the Hessian at Q(W) as straight-through training sees it. inside (P,): 1 for a
    weight that its grid reaches, 0 for one beyond the grid's end or held."""
    return lambda v: inside * product(inside * v)


def lanczos(product: Matvec, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Diagonal (k,) and off-diagonal (k - 1,) of T_k, float64, k at most `steps`: fewer when the vectors span an invariant
    subspace. Raises InputError when a product is NaN or Inf."""
    v = start / start.norm()
    basis, alphas, betas = [v], [], []
    for j in range(min(steps, len(start))):
        w = product(basis[-1])
        if not bool(torch.isfinite(w).all()):
            raise InputError(
                f"the Hessian's product holds NaN or Inf in Lanczos step {j + 1}; check the loss and the weights"
            )
        alphas.append(float(w.double() @ basis[-1].double()))
        for _ in range(2):
            for u in basis:
                w = w - (w @ u) * u
        beta = float(w.double().norm())
        if j + 1 == min(steps, len(start)) or beta <= 1e-6 * max(max(map(abs, alphas)), *betas, 1e-300):
            break
        betas.append(beta)
        basis.append(w / beta)
    return torch.tensor(alphas, dtype=torch.float64), torch.tensor(betas, dtype=torch.float64)


@dataclass(frozen=True)
class Spectrum:
    """Quadrature of each probe: nodes theta, and weights tau^2 that add up to 1. size: P. config: what near zero means."""

    nodes: list[Tensor]
    weights: list[Tensor]
    size: int
    config: HessianConfig

    def each(self, value: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean over the spectrum of a function of the eigenvalue, as every probe sees it: (probes,)."""
        return torch.stack([(w * value(n)).sum() for n, w in zip(self.nodes, self.weights, strict=True)])

    def flat(self) -> float:
        """Eigenvalues nearer to zero than this count as flat directions."""
        return self.config.near_zero * max(float(n.abs().max()) for n in self.nodes)

    def figures(self, flat: float | None = None) -> dict[str, float]:
        """lambda_max, lambda_min, trace, rms (the root of the mean square), near_zero and negative (shares of the density:
        nearer to zero than `flat`, and below -flat), each with its standard deviation over the probes beside it, as
        `<name>_std`; 0 with one probe. flat: None takes this spectrum's own; models are compared at one."""
        extremes = torch.stack([torch.stack([n.max(), n.min()]) for n in self.nodes])
        flat = self.flat() if flat is None else flat
        found = {
            "lambda_max": extremes[:, 0],
            "lambda_min": extremes[:, 1],
            "trace": self.size * self.each(lambda n: n),
            "rms": self.each(lambda n: n * n).sqrt(),
            "near_zero": self.each(lambda n: (n.abs() < flat).double()),
            "negative": self.each(lambda n: (n <= -flat).double()),
        }
        out = {}
        for name, values in found.items():
            out[name] = float(
                values.max() if name == "lambda_max" else values.min() if name == "lambda_min" else values.mean()
            )
            out[f"{name}_std"] = float(values.std(correction=1)) if len(values) > 1 else 0.0
        return out

    def density(self, at: Tensor, width: float) -> Tensor:
        """The density (n,) at eigenvalues (n,), smoothed by a Gaussian of standard deviation `width`."""
        out = torch.zeros_like(at, dtype=torch.float64)
        for nodes, weights in zip(self.nodes, self.weights, strict=True):
            z = (at.double()[:, None] - nodes) / width
            out += ((-0.5 * z * z).exp() * weights).sum(1) / (width * math.sqrt(2 * math.pi))
        return out / len(self.nodes)


def spectrum(
    product: Matvec, size: int, config: HessianConfig, generator: torch.Generator, report: Report = lambda done, total: None,
    dtype: torch.dtype = torch.float32,
) -> Spectrum:  # fmt: skip
    """Of a symmetric operator on vectors of `size` numbers on the generator's device."""
    nodes, weights = [], []
    for i in range(config.probes):
        signs = torch.randint(0, 2, (size,), generator=generator, device=generator.device)
        alpha, beta = lanczos(product, (2 * signs - 1).to(dtype), config.steps)
        T = torch.diag(alpha) + torch.diag(beta, 1) + torch.diag(beta, -1)
        theta, vectors = torch.linalg.eigh(T)
        nodes.append(theta)
        weights.append(vectors[0].square())
        report(i + 1, config.probes)
    return Spectrum(nodes, weights, size, config)
