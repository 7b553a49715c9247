"""Pictures of Hessian spectra: densities, and their figures against what was varied."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tasks.figures import panels, save
from windquant.hessian import Spectrum

Rows = Sequence[dict[str, Any]]


def densities(spectra: Mapping[str, Spectrum], file: Path) -> None:
    """One curve a model on logarithmic axes; eigenvalues are linear in a hundredth of their range around zero, which is also
    how much the curves are smoothed."""
    low = min(float(n.min()) for s in spectra.values() for n in s.nodes)
    high = max(float(n.max()) for s in spectra.values() for n in s.nodes)
    width = 0.01 * max(-low, high)
    ends = 1.05 * torch.tensor([low / width, high / width], dtype=torch.float64).asinh()
    at = width * torch.linspace(float(ends[0]), float(ends[1]), 800, dtype=torch.float64).sinh()
    figure, (axes,) = panels(1, 7, 4.5)
    for name, s in spectra.items():
        axes.plot(at, s.density(at, width).clamp_min(1e-9), label=name)
    axes.set_xscale("symlog", linthresh=width)
    axes.set(yscale="log", xlabel="eigenvalue of the loss's Hessian", ylabel="density")
    axes.legend()
    axes.grid(alpha=0.3)
    save(figure, file)


def against(what: str, runs: Mapping[str, tuple[Sequence[float], Rows]], file: Path) -> None:
    """Largest magnitude and share near zero, with their spread over probes. runs: name -> where (n,), and what
    `Spectrum.figures` says there (n,)."""
    figure, (left, right) = panels(2, 11, 4.5)
    for name, (at, rows) in runs.items():
        largest = [max((abs(r[k]), r[f"{k}_std"]) for k in ("lambda_max", "lambda_min")) for r in rows]
        left.errorbar(at, *zip(*largest, strict=True), marker="o", capsize=3, label=name)
        shares = [(r["near_zero"], r["near_zero_std"]) for r in rows]
        right.errorbar(at, *zip(*shares, strict=True), marker="o", capsize=3, label=name)
    left.set(yscale="log", xlabel=what, ylabel="largest magnitude of an eigenvalue")
    right.set(xlabel=what, ylabel="share of eigenvalues near zero")
    left.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save(figure, file)
