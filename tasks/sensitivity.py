"""Stage 3: the distortion table, unit by width, in predicted nats a token.

Out: table.parquet, one row a unit: what it is, and for every width its distortion and its bytes. Its header carries
what `allocate` needs to know of the model.
"""

import torch

from tasks import models, progress, store
from tasks.job import Job, Record
from tasks.plans import Table, save_distortions
from tasks.reach import other_bytes_by_bits
from tasks.reach import reach as reach_of
from tasks.statistics import BlockStatistics, Protector
from windquant import blocks, sensitivity, units
from windquant.calibrate import Scratch
from windquant.errors import about
from windquant.features import features
from windquant.grids import WIDTHS
from windquant.sensitivity import SensitivityConfig


def run(config: SensitivityConfig, job: Job) -> Record:
    folder = store.path("prepare") / "model"
    walk = models.walk(folder, job.device)
    protector = Protector(config.protection)
    reach = reach_of(walk.model, config.chunk_size, protection=config.protection)
    body = units.cut(blocks.matrices(walk.model), reach.chunk_size)
    found = of_units(walk, reach.chunk_size, protector, job.scratch, "rounding every unit to every width")
    D = found["D"]
    header = {
        "model_hash": store.load_json(store.path("prepare") / "manifest.json")["model_hash"],
        "chunk_size": reach.chunk_size,
        "other_bytes": other_bytes_by_bits(walk.model, reach.chunk_size, config.protection),
        "salient": config.salient,
        "salient_share": config.salient_share,
    }
    save_distortions(
        job.out / "table.parquet", Table(body, D, units.sizes(body), header, found["salient"].tolist(), found["features"])
    )
    totals = {f"distortion_all/{b:g}": float(D[:, j].sum()) for j, b in enumerate(WIDTHS)}
    return Record(params={"chunk_size": reach.chunk_size, "units": len(body)}, metrics=totals)


def of_units(
    walk: blocks.Walk, chunk_size: int, protector: Protector, scratch: Scratch, label: str
) -> dict[str, torch.Tensor]:
    """D: distortions of all units at all widths, (units, widths). salient: how many salient weights every unit holds.
    features: (units, len(FEATURES))."""
    found, report = [], progress.bar(label)
    for i in range(len(walk)):
        if not scratch.has(f"block-{i}"):
            scratch.put(f"block-{i}", _block(walk, i, chunk_size, protector))
        found.append(scratch.get(f"block-{i}"))
        report(i + 1, len(walk))
    return {name: torch.cat([f[name] for f in found]) for name in found[0]}


def _block(walk: blocks.Walk, index: int, chunk_size: int, protector: Protector) -> dict[str, torch.Tensor]:
    statistics = BlockStatistics(index)
    tables, counts, seen = [], [], []
    with walk.block(index) as module:
        for name, linear in blocks.linears(module).items():
            with about(walk.path(index, name)):
                H, g = (t.to(walk.device) for t in (statistics.moment(name), statistics.fisher(name)))
                salient = protector(index, name, linear.weight)
                tables.append(sensitivity.distortions(linear.weight, H, g, chunk_size, salient).cpu())
            counts += salient.counts(chunk_size) if salient else [0] * len(tables[-1])
            seen.append(features(linear.weight.cpu(), statistics.scale(name), chunk_size))
    return {"D": torch.cat(tables), "salient": torch.tensor(counts), "features": torch.cat(seen)}
