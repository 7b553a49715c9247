"""Stage 4: every unit at every width, so that a search can compose any plan and measure its loss.

Out: block-<index>.safetensors, the block's matrices at every width; manifest.json. Units are rounded to nearest, or, with
`steps`, reconstructed under many plans at once.
"""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tasks import models, plans, progress, store
from tasks.job import Job, Record
from tasks.statistics import BlockStatistics, Protector
from windquant import blocks, correction, supernet, units
from windquant.allocate import Problem, price
from windquant.errors import about
from windquant.reconstruct import ReconstructConfig
from windquant.supernet import Neighbourhood
from windquant.units import columns_of

log = logging.getLogger("windquant")
WIDTHS_A_UNIT = 3
"""About as many a unit is drawn at: a width learns in that share of the steps, and so much faster."""


@dataclass(frozen=True)
class SupernetConfig:
    """steps: of reconstruction, a block, each under a plan of its own; 0: units are rounded to nearest. batch: calibration
    windows a step. tokens: of every window.
    lowest_bits, highest_bits: the plans drawn lie between the lagrangian ones at these targets. groups, units: how far from
    them, standard deviations of the logarithm of what their tables are wrong by, for whole groups of units and for each by
    itself."""

    steps: int = 0
    batch: int = 2
    tokens: int = 256
    lowest_bits: float = 1.9
    highest_bits: float = 3.1
    groups: float = 0.4
    units: float = 0.4

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps {self.steps} is negative; 0 rounds to nearest")
        for name in ("batch", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not at least 1")
        for name in ("groups", "units"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name):g} is negative")
        if not 1 <= self.lowest_bits < self.highest_bits <= 8:
            raise ValueError(f"lowest_bits {self.lowest_bits:g} and highest_bits {self.highest_bits:g} are not two targets "
                             f"between 1 and 8, the lower first")  # fmt: skip


def run(config: SupernetConfig, job: Job) -> Record:
    table = plans.load_distortions(store.path("sensitivity") / "table.parquet")
    walk = models.walk(store.path("prepare") / "model", job.device)
    made = _learned(config, table, walk, job) if config.steps else _rounded(table, walk, job)
    for i, tensors in enumerate(made):
        store.save_tensors(job.out / f"block-{i}.safetensors", tensors)
    store.save_json(job.out / "manifest.json", asdict(config))
    return Record()


def _rounded(table: plans.Table, walk: blocks.Walk, job: Job) -> Iterator[dict[str, Tensor]]:
    protector, report = Protector(table.protection), progress.bar("every unit at every width")
    for i in range(len(walk)):
        if not job.scratch.has(f"block-{i}"):
            statistics, packed = BlockStatistics(i), {}
            with walk.block(i) as block:
                for name, linear in blocks.linears(block).items():
                    full, w = walk.path(i, name), linear.weight
                    with about(full):
                        H, salient = statistics.moment(name).to(walk.device), protector(i, name, w)
                        packed[full] = supernet.rounded(w, H, table.header["chunk_size"], salient)
            job.scratch.put(f"block-{i}", supernet.tensors_of(packed))
        yield job.scratch.get(f"block-{i}")
        report(i + 1, len(walk))


def _learned(config: SupernetConfig, table: plans.Table, walk: blocks.Walk, job: Job) -> Iterator[dict[str, Tensor]]:
    chunk = table.header["chunk_size"]
    widths = {u.matrix.name: [2.0] * len(columns_of(u.matrix.columns, chunk)) for u in table.body}
    learning = ReconstructConfig(config.steps, config.batch, min(1.0, WIDTHS_A_UNIT / config.steps))
    net = supernet.Supernet(walk, widths.__getitem__, chunk, learning, job.common.seed, job.scratch, "net", log.warning,
                            Protector(table.protection), draw=neighbourhood(config, table))  # fmt: skip
    ids = store.load_tensors(store.path("prepare") / "windows" / "calibration.safetensors")["ids"].long()
    made: Iterator[Any] = net.run(ids[:, : config.tokens], progress.bar("units under many plans"))
    return made


def neighbourhood(config: SupernetConfig, table: plans.Table) -> Neighbourhood:
    """Targets that the model cannot reach are taken as its own end of the range."""
    floor, ceiling = units.bits_range(table.body, table.salient_bytes)
    prices = []
    for bits in (config.highest_bits, config.lowest_bits):
        budget = max(table.budget(min(max(bits, floor), ceiling)), int(table.B.amin(1).sum()))
        prices.append(price(Problem(table.D, table.B, budget)))
    psi = correction.features(table.body, 4)
    block = torch.tensor([u.matrix.block for u in table.body])
    return Neighbourhood(table.D, table.B, psi, block, (prices[0], prices[1]), config.groups, config.units)
