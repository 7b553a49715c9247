"""Stage 8: spectra of the loss's Hessian for the reference and every checkpoint, and before and after a pull to the grid.

Out: hessian.json, extremes, trace and shares with their spread over probes; density.png, one curve a model; bits.png,
magnitude and share near zero against effective bits. With `probes: 0` hessian.json alone, and empty.

A checkpoint's Hessian is that at its dense weights Q(W). `<plan>-latent` is the chosen plan's at the latent weights W that
training of codes starts from, `<plan>-pulled` the same after WinQ's pull, which moves W alone (windquant/hessian.py says
more). What counts as near zero is the same for all: a share of the reference's largest magnitude.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tasks import models, packed, progress, spectra, store
from tasks.config import by_effort
from tasks.job import Job, Record
from windquant import blocks, hessian, qat
from windquant.errors import above_zero, between_0_and_1
from windquant.hessian import HessianConfig, Spectrum

log = logging.getLogger("windquant")


@dataclass(frozen=True)
class DiagnoseConfig:
    """probes, steps, near_zero: see `windquant.hessian`; 0 probes: no diagnostics. block: whose quantized matrices' Hessian
    it is; null: the middle one. windows, tokens: of the validation text that the loss is taken on. alpha: of the pull."""

    probes: int | None = by_effort(demo=0, full=8)
    steps: int = 20
    near_zero: float = 1e-2
    block: int | None = None
    windows: int = 2
    tokens: int = 128
    alpha: float = 0.4

    def __post_init__(self) -> None:
        above_zero(self, "steps", "near_zero", "windows", "tokens")
        between_0_and_1(self, "alpha")
        for name in ("probes", "block"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is negative")


def run(config: DiagnoseConfig, job: Job) -> Record:
    rows: list[dict[str, Any]] = []
    if config.probes:
        ids = store.load_tensors(store.path("prepare") / "windows" / "validation.safetensors")["ids"]
        ids, found = ids[: config.windows, : config.tokens].long(), {}
        for name, bits, model in _models(job, config.alpha):
            found[name] = spectrum_of(name, model, ids, config, job.common.seed)
            rows.append({"model": name, "bits": bits} | found[name].figures(found["reference"].flat()))
            log.info("%s: eigenvalues %.3g to %.3g, trace %.3g, %.2f %% near zero, %.2f %% negative", name,
                     rows[-1]["lambda_min"], rows[-1]["lambda_max"], rows[-1]["trace"], 100 * rows[-1]["near_zero"],
                     100 * rows[-1]["negative"])  # fmt: skip
        spectra.densities(found, job.out / "density.png")
        spectra.against("effective bits", {r["model"]: ([r["bits"]], [r]) for r in rows}, job.out / "bits.png")
    else:
        log.info("no diagnostics are asked for (diagnose.probes)")
    store.save_json(job.out / "hessian.json", rows)
    columns = {c: [r[c] for r in rows] for c in rows[0]} if rows else {}
    return Record(
        tables={"hessian": columns} if rows else {},
        metrics={f"{key}/{r['model']}": r[key] for r in rows for key in r if key not in ("model", "bits")},
        files=sorted(job.out.glob("*.png")),
    )


def _models(job: Job, alpha: float) -> Iterator[tuple[str, float, Any]]:
    """Name, effective bits and dense model, one at a time, the reference first."""
    reference = models.reference(store.path("prepare") / "model", job.device)
    yield "reference", 16.0, reference
    sizes = {}
    for stage in ("quantize", "finetune"):
        for folder in sorted(p for p in store.path(stage).iterdir() if p.is_dir()):
            sizes[folder.name] = store.load_json(store.path(stage) / "bytes.json")[folder.name]["effective_bits"]
            yield folder.name, sizes[folder.name], packed.load(folder, job.device).dequantize(torch.float32)
    chosen = store.load_json(store.path("allocate") / "summary.json")["chosen"]
    for name, pull in (("latent", 0.0), ("pulled", alpha)):
        model = at_latent_weights(packed.load(store.path("quantize") / chosen, job.device), reference, pull)
        yield f"{chosen}-{name}", sizes[chosen], model


@torch.no_grad()
def at_latent_weights(model: Any, reference: Any, alpha: float) -> Any:
    """A packed model as a dense one, at the weights that training of codes starts from, pulled by alpha."""
    latent = {}
    for name, _, matrix in packed.matrices(model):
        trained = qat.QuantizedLinear(matrix, like=reference.get_submodule(name).weight)
        trained.pull_to_grid_(alpha)
        latent[name] = latent_weights(trained)
    dense = model.dequantize(torch.float32)
    for name, weight in latent.items():
        dense.get_submodule(name).weight.copy_(weight)
    return dense


def latent_weights(layer: qat.QuantizedLinear) -> Tensor:
    """What is trained, (rows, columns)."""
    return layer.w.detach().transpose(0, 1).flatten(1)[:, : layer.in_features]


def spectrum_of(
    name: str, model: Any, ids: Tensor, config: DiagnoseConfig, seed: int, inside: Sequence[Tensor] | None = None
) -> Spectrum:
    """Of a dense model's loss on token ids (windows, T), for the quantized matrices of one block. inside: of each, where its
    grid reaches, for the Hessian as straight-through training sees it."""
    prefix, found = blocks.decoder_blocks(model)
    block = len(found) // 2 if config.block is None else min(config.block, len(found) - 1)
    layers = blocks.linears(model.get_submodule(f"{prefix}.{block}"))
    parameters = [layer.weight.requires_grad_() for layer in layers.values()]
    device, size = parameters[0].device, sum(p.numel() for p in parameters)
    settings = HessianConfig(config.probes or 1, config.steps, config.near_zero)
    product = hessian.hessian_product(_loss(model, ids.to(device)), parameters)
    if inside is not None:
        product = hessian.straight_through(product, torch.cat([t.flatten() for t in inside]))
    generator = torch.Generator(device).manual_seed(seed)
    made = hessian.spectrum(product, size, settings, generator, progress.bar(f"spectrum of {name}"))
    for p in parameters:
        p.requires_grad_(False)
    return made


def _loss(model: Any, ids: Tensor) -> Callable[[], Tensor]:
    return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss
