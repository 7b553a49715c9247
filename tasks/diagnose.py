"""Stage 8: spectra of the loss's Hessian for the reference and every checkpoint.

Out: hessian.json, extremes, trace and shares with their spread over probes; density.png, one curve a model. With `probes: 0`
hessian.json alone, and empty.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks import models, packed, progress, store
from tasks.config import by_effort
from tasks.job import Job, Record
from windquant import blocks, hessian
from windquant.errors import above_zero
from windquant.hessian import HessianConfig, Spectrum

log = logging.getLogger("windquant")


@dataclass(frozen=True)
class DiagnoseConfig:
    """probes, steps, near_zero: see `windquant.hessian`; 0 probes: no diagnostics. block: whose quantized matrices' Hessian
    it is; null: the middle one. windows, tokens: of the validation text that the loss is taken on."""

    probes: int | None = by_effort(demo=0, full=8)
    steps: int = 20
    near_zero: float = 1e-3
    block: int | None = None
    windows: int = 2
    tokens: int = 128

    def __post_init__(self) -> None:
        above_zero(self, "steps", "near_zero", "windows", "tokens")
        for name in ("probes", "block"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is negative")


def run(config: DiagnoseConfig, job: Job) -> Record:
    rows: list[dict[str, Any]] = []
    if config.probes:
        spectra = {}
        for name, model in _models(job):
            spectra[name] = spectrum_of(name, model, config, job.device, job.common.seed)
            rows.append({"model": name} | spectra[name].figures())
            log.info("%s: eigenvalues %.3g to %.3g, trace %.3g, %.1f %% near zero, %.1f %% negative", name,
                     rows[-1]["lambda_min"], rows[-1]["lambda_max"], rows[-1]["trace"], 100 * rows[-1]["near_zero"],
                     100 * rows[-1]["negative"])  # fmt: skip
        _plot(spectra, job.out / "density.png")
    else:
        log.info("no diagnostics are asked for (diagnose.probes)")
    store.save_json(job.out / "hessian.json", rows)
    columns = {c: [r[c] for r in rows] for c in rows[0]} if rows else {}
    return Record(
        tables={"hessian": columns} if rows else {},
        metrics={f"{key}/{r['model']}": r[key] for r in rows for key in r if key != "model"},
        files=sorted(job.out.glob("*.png")),
    )


def _models(job: Job) -> Iterator[tuple[str, Any]]:
    """Dense models, one at a time."""
    yield "reference", models.reference(store.path("prepare") / "model", job.device)
    for stage in ("quantize", "finetune"):
        for folder in sorted(p for p in store.path(stage).iterdir() if p.is_dir()):
            yield folder.name, packed.load(folder, job.device).dequantize(torch.float32)


def spectrum_of(name: str, model: Any, config: DiagnoseConfig, device: torch.device, seed: int) -> Spectrum:
    """Of a dense model's loss on validation text, for the quantized matrices of one block."""
    ids = store.load_tensors(store.path("prepare") / "windows" / "validation.safetensors")["ids"]
    ids = ids[: config.windows, : config.tokens].long().to(device)
    prefix, found = blocks.decoder_blocks(model)
    block = len(found) // 2 if config.block is None else min(config.block, len(found) - 1)
    layers = blocks.linears(model.get_submodule(f"{prefix}.{block}"))
    parameters = [layer.weight.requires_grad_() for layer in layers.values()]
    size = sum(p.numel() for p in parameters)
    settings = HessianConfig(config.probes or 1, config.steps, config.near_zero)
    product = hessian.hessian_product(_loss(model, ids), parameters)
    generator = torch.Generator(device).manual_seed(seed)
    return hessian.spectrum(product, size, settings, generator, progress.bar(f"spectrum of {name}"))


def _loss(model: Any, ids: Tensor) -> Callable[[], Tensor]:
    return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss


def _plot(spectra: dict[str, Spectrum], file: Path) -> None:
    """Densities on a logarithmic axis."""
    from matplotlib.figure import Figure

    low = min(float(n.min()) for s in spectra.values() for n in s.nodes)
    high = max(float(n.max()) for s in spectra.values() for n in s.nodes)
    at = torch.linspace(low - 0.05 * (high - low), high + 0.05 * (high - low), 800, dtype=torch.float64)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, s in spectra.items():
        axes.plot(at, s.density(at, 0.01 * (high - low)).clamp_min(1e-9), label=name)
    axes.set(yscale="log", xlabel="eigenvalue of the loss's Hessian", ylabel="density")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120, metadata={"Software": None})
