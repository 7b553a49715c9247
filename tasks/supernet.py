"""Stage 4: units reconstructed under many plans at once, so that a search can compose any plan and measure its loss.

Out: block-<index>.safetensors, the block's matrices at every width; manifest.json. With `steps: 0` only the manifest, and
plans can be made from the distortion table alone.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tasks import models, plans, progress, store
from tasks.config import by_effort
from tasks.job import Job, Record
from tasks.statistics import Protector
from windquant import correction, units
from windquant.allocate import Problem, price
from windquant.reconstruct import ReconstructConfig
from windquant.supernet import Neighbourhood, Supernet
from windquant.units import columns_of

log = logging.getLogger("windquant")
WIDTHS_A_UNIT = 3
"""About as many widths a unit is drawn at: a width learns in that share of the steps, and so much faster."""


@dataclass(frozen=True)
class SupernetConfig:
    """steps: a block, each under a plan of its own; 0: none. batch: calibration windows a step. tokens: of every window.
    lowest_bits, highest_bits: the plans drawn lie between the lagrangian ones at these targets. groups, units: how far from
    them, standard deviations of the logarithm of what their tables are wrong by, for whole groups of units and for each by
    itself."""

    steps: int | None = by_effort(demo=120, full=400)
    batch: int = 2
    tokens: int = 256
    lowest_bits: float = 1.9
    highest_bits: float = 3.1
    groups: float = 0.4
    units: float = 0.4

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 0:
            raise ValueError(f"steps {self.steps} is negative; 0 makes no supernet")
        for name in ("batch", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not at least 1")
        for name in ("groups", "units"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name):g} is negative")
        if not 1 <= self.lowest_bits < self.highest_bits <= 16:
            raise ValueError(f"lowest_bits {self.lowest_bits:g} and highest_bits {self.highest_bits:g} are not two targets "
                             f"between 1 and 16, the lower first")  # fmt: skip


def run(config: SupernetConfig, job: Job) -> Record:
    table = plans.load_distortions(store.path("sensitivity") / "table.parquet")
    manifest = {"steps": config.steps, "lowest_bits": config.lowest_bits, "highest_bits": config.highest_bits}
    if config.steps:
        walk, chunk = models.walk(store.path("prepare") / "model", job.device), table.header["chunk_size"]
        widths = {u.matrix.name: [2.0] * len(columns_of(u.matrix.columns, chunk)) for u in table.body}
        learning = ReconstructConfig(config.steps, config.batch, min(1.0, WIDTHS_A_UNIT / config.steps))
        net = Supernet(walk, widths.__getitem__, chunk, learning, job.common.seed, job.scratch, "net", log.warning,
                       Protector(table.protection), draw=neighbourhood(config, table))  # fmt: skip
        ids = store.load_tensors(store.path("prepare") / "windows" / "calibration.safetensors")["ids"].long()
        made: Iterator[Any] = net.run(ids[:, : config.tokens], progress.bar("units under many plans"))
        for i, tensors in enumerate(made):
            store.save_tensors(job.out / f"block-{i}.safetensors", tensors)
    else:
        log.info("no supernet is asked for: allocators that need true losses cannot run")
    store.save_json(job.out / "manifest.json", manifest)
    return Record(params={"steps": config.steps})


def neighbourhood(config: SupernetConfig, table: plans.Table) -> Neighbourhood:
    """Targets that the model cannot reach are taken as its own end of the range."""
    floor, ceiling = units.bits_range(table.body, table.salient_bytes)
    prices = []
    for bits in (config.highest_bits, config.lowest_bits):
        budget = max(table.budget(min(max(bits, floor), ceiling)), int(table.B.amin(1).sum()))
        prices.append(price(Problem(table.D, table.B, budget)))
    psi = correction.features(table.body, 4)[:, 0, :-2]
    block = torch.tensor([u.matrix.block for u in table.body])
    return Neighbourhood(table.D, table.B, psi, block, (prices[0], prices[1]), config.groups, config.units)
