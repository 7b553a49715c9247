"""The Hessian's spectrum against the width (WinQ, arXiv 2605.17471): do magnitudes fall from 4 bits to 1, does the share
near zero rise?

The whole model rounded to nearest at one width, the reference at 16; the spectrum is that of the middle block's matrices, on
validation text. Settings are those of params.yaml's `diagnose`, with --seeds probes in place of its own. Uses the artifacts
of prepare to supernet.
"""

from dataclasses import replace
from typing import Any

import torch

from tasks import models, plans, store
from tasks.config import Common
from tasks.diagnose import spectrum_of
from tasks.searching import units_of
from tasks.settings import load as load_params
from windquant.supernet import Composed

WIDTHS = (16, 4, 3, 2, 1.58, 1)


def run(seeds: int) -> tuple[list[dict[str, Any]], list[str]]:
    table = plans.load_distortions(store.path("sensitivity") / "table.parquet")
    config = replace(load_params().diagnose, probes=seeds)
    model = models.reference(store.path("prepare") / "model", torch.device("cpu"))
    net = Composed(model, table.body, units_of)
    rows = []
    for bits in WIDTHS:
        net.set([float(bits)] * len(table.body))
        found = spectrum_of(f"{bits:g} bits", model, config, torch.device("cpu"), Common().seed).figures()
        rows.append({"model": "uniform, rounded to nearest" if bits < 16 else "reference", "bits": bits} | found)
    by = {r["bits"]: r for r in rows}
    claims = {
        "the largest eigenvalue falls from 4 bits to 1": by[1]["lambda_max"] < by[4]["lambda_max"],
        "the share near zero rises from 4 bits to 1": by[1]["near_zero"] > by[4]["near_zero"],
    }
    return rows, [f"{claim}: {'yes' if held else 'no, not here'}" for claim, held in claims.items()]
