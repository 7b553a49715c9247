"""Hessian spectra against the width, against the step of training, and before and after a pull to the grid: do the claims of
WinQ (arXiv 2605.17471) hold here? Magnitudes fall from 4 bits to 1, the share near zero rises, a pull raises magnitudes.

The embedded model, every matrix rounded to nearest at one width, the reference at 16: the Hessian at Q(W) of the middle
block's matrices, and with `pulled` that at the latent weights, which are the reference's, after W <- 0.6 W + 0.4 Q(W). Then
a small model that is really trained at each width (`benchmarks.hessian_small`). Text: validation articles. Near zero is, for
all rows of a model, what is nearer to zero than a hundredth of its reference's largest magnitude. --seeds: probes. Pictures
are left in artifacts/hessian. Uses the artifacts of prepare to supernet; rows that are finished survive a kill.
"""

from typing import Any

import torch

from benchmarks import hessian_small
from benchmarks.hessian_rows import Kept, Row, compared
from tasks import models, plans, spectra, store
from tasks.searching import units_of
from windquant.supernet import Composed

WIDTHS, PULLED, ALPHA = (16, 4, 3, 2, 1.58, 1), (2, 1), 0.4


def run(seeds: int) -> tuple[list[Row], list[str]]:
    kept = Kept("hessian", seeds, ["windquant/supernet.py"])
    small = Kept("hessian-small", seeds, ["benchmarks/hessian_small.py", "windquant/qat.py", "windquant/reconstruct.py"])
    rows, trained = _embedded(kept), hessian_small.rows(small)
    _pictures(kept, rows, trained)
    return rows + trained, [*_claims("embedded, rounded", rows), *hessian_small.claims(trained)]


def _embedded(kept: Kept) -> list[Row]:
    table = plans.load_distortions(store.path("sensitivity") / "table.parquet")
    net = Composed(models.reference(store.path("prepare") / "model", torch.device("cpu")), table.body, units_of)
    ids = store.load_tensors(store.path("prepare") / "windows" / "validation.safetensors")["ids"].long()
    ids, rows = ids[: kept.config.windows, : kept.config.tokens], []

    def rounded(bits: float) -> Any:
        net.now = [None] * len(net.now)  # a pull moves weights behind its back
        net.set([float(bits)] * len(table.body))
        return net.model

    @torch.no_grad()
    def pulled(bits: float) -> Any:
        rounded(bits)
        for name, layer in net.layers.items():
            layer.weight.copy_(torch.lerp(net.original[name], layer.weight, ALPHA))
        return net.model

    for name, make, widths in (("embedded", rounded, WIDTHS), ("embedded, pulled", pulled, PULLED)):
        for bits in widths:
            found, loss = kept.spectrum(f"{name} {bits:g}", lambda make=make, bits=bits: make(bits), ids)
            flat = kept.made["embedded 16"][0].flat()
            rows.append({"model": name, "bits": bits, "step": 0, "nll": loss} | found.figures(flat))
    return rows


def _claims(model: str, rows: list[Row]) -> list[str]:
    by = {(r["model"], r["bits"]): r for r in rows}
    four, one, latent = by["embedded", 4], by["embedded", 1], by["embedded", 16]
    return [
        compared(f"{model}: magnitudes are larger at 4 bits than at 1", one, four),
        compared(f"{model}: the mean square is larger at 4 bits than at 1", one, four, "rms"),
        compared(f"{model}: more is near zero at 1 bit than at 4", four, one, "near_zero"),
        *(
            compared(f"{model}, bits {b}: a pull raises magnitudes at the latent weights", latent, by["embedded, pulled", b])
            for b in PULLED
        ),
    ]


def _pictures(kept: Kept, embedded: list[Row], small: list[Row]) -> None:
    folder = store.path("hessian")
    folder.mkdir(parents=True, exist_ok=True)
    names = {f"embedded {b:g}": f"{b:g} bits" for b in WIDTHS}
    spectra.densities({name: kept.made[key][0] for key, name in names.items()}, folder / "density.png")
    own = [r for r in embedded if r["model"] == "embedded"]
    spectra.against("bits", {"embedded, rounded": ([r["bits"] for r in own], own)}, folder / "bits.png")
    runs = {f"{b:g} bits": [r for r in small if r["model"] == "small" and r["bits"] == b] for b in hessian_small.WIDTHS}
    at = {name: ([r["step"] for r in own], own) for name, own in runs.items()}
    spectra.against("step of training, small model", at, folder / "steps.png")
