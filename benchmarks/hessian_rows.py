"""Spectra that survive a kill, and what is said of two of them."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tasks import store
from tasks.config import Common
from tasks.diagnose import spectrum_of
from tasks.settings import load as load_params
from windquant.hessian import HessianConfig, Spectrum

STEPS, SAME = 16, 0.01
Row = dict[str, Any]


class Kept:
    """Spectra made so far; those on disk, under `name`, hold while the code that they are made with stays the same."""

    def __init__(self, name: str, probes: int, code: Sequence[str]) -> None:
        files = ("windquant/hessian.py", "benchmarks/hessian_rows.py", *code)
        made_of = [probes, *(store.hash_file(store.Path(f)) for f in files)]
        self.scratch = store.Scratch(f"benchmark-{name}", hashlib.sha256(repr(made_of).encode()).hexdigest())
        self.config = replace(load_params().diagnose, probes=probes, steps=STEPS)
        self.made: dict[str, tuple[Spectrum, float]] = {}

    def spectrum(
        self, key: str, model: Callable[[], Any], ids: Tensor, inside: Sequence[Tensor] | None = None
    ) -> tuple[Spectrum, float]:
        """And the loss. model: called where it is not kept yet."""
        if not self.scratch.has_json(key):
            dense = model()
            found = spectrum_of(key, dense, ids, self.config, Common().seed, inside)
            with torch.no_grad():
                loss = float(dense(input_ids=ids, labels=ids, use_cache=False).loss)
            values = [[t.tolist() for t in part] for part in (found.nodes, found.weights)]
            self.scratch.put_json(key, {"loss": loss, "size": found.size, "quadrature": values})
        said = self.scratch.get_json(key)
        nodes, weights = ([torch.tensor(t, dtype=torch.float64) for t in part] for part in said["quadrature"])
        settings = HessianConfig(len(nodes), STEPS, self.config.near_zero)
        self.made[key] = Spectrum(nodes, weights, said["size"], settings), said["loss"]
        return self.made[key]


def compared(claim: str, before: Row, after: Row, key: str = "magnitude") -> str:
    """Whether a figure is larger in `after`, by more than the standard deviations of both over the probes, which say nothing
    of the choice of text, and by more than SAME of it."""
    (x, spread), (y, other) = figure(before, key), figure(after, key)
    verdict = "no difference" if abs(y - x) <= max(spread + other, SAME * abs(x)) else "yes" if y > x else "no"
    return f"{claim}: {verdict} ({x:.4g} +- {spread:.2g} to {y:.4g} +- {other:.2g})"


def figure(row: Row, key: str) -> tuple[float, float]:
    """A value and its spread. magnitude: that of the largest eigenvalue or the lowest one."""
    if key == "magnitude":
        return max((abs(row[k]), row[f"{k}_std"]) for k in ("lambda_max", "lambda_min"))
    return row[key], row[f"{key}_std"]
