"""Allocators at equal effective bits: every plan rounded to nearest on fitted scales, perplexity of held-out articles.

Uses the artifacts of prepare, calibrate and sensitivity. `uniform` spends the whole budget evenly; `uniform-2` is one
width everywhere, which leaves some of the budget unused.
"""

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.dense import Dense
from tasks import plans, progress, store
from tasks.settings import load as load_params
from tasks.statistics import BlockStatistics, Protector
from windquant import units
from windquant.allocate import ALLOCATORS, Problem
from windquant.grids import WIDTHS
from windquant.quantize import quantize_matrix


def run(seeds: int) -> tuple[list[dict[str, Any]], list[str]]:
    params = load_params()
    table = plans.load_distortions(store.path("sensitivity") / "table.parquet")
    target = params.allocate.target_bits
    problem = Problem(table.D, table.B, table.budget(target))
    bench = Bench(table, problem, Dense(params.benchmark.windows or 0))
    rows = [bench.row("reference", None, 0, target)]
    for name, allocator in ALLOCATORS.items():
        for seed in range(seeds if name == "random" else 1):
            choice = allocator(problem, torch.Generator().manual_seed(seed))
            rows.append(bench.row(name, choice, seed, target))
    two = torch.full((len(table.body),), WIDTHS.index(2))
    rows.append(bench.row("uniform-2", two, 0, target))
    by = {r["allocator"]: r["perplexity"] for r in rows}
    return rows, [
        f"{name} / lagrangian: {by[name] / by['lagrangian']:.1f}x perplexity"
        for name in ("uniform", "uniform-2", "sensitivity-rank")
    ]


class Bench:
    def __init__(self, table: plans.Table, problem: Problem, dense: Dense) -> None:
        self.table, self.problem, self.dense = table, problem, dense

    def row(self, allocator: str, choice: Tensor | None, seed: int, target: float) -> dict[str, Any]:
        began = time.monotonic()
        size = predicted = None
        if choice is not None:
            plan = self.table.plan(choice)
            predicted, size = self.problem.distortion(choice), plan.size
            round_to_nearest(self.dense, plan)
        found = self.dense.score(allocator)
        return {
            "allocator": allocator,
            "target": target,
            "effective_bits": 16.0 if size is None else units.effective_bits(size, units.weights_in(self.table.body)),
            "predicted_nats": predicted,
            "nll": found.nll,
            "perplexity": found.perplexity,
            "seed": seed,
            "seconds": time.monotonic() - began,
        }


def round_to_nearest(dense: Dense, plan: plans.Plan) -> None:
    """Every matrix of the reference, with its moments as `calibrate` took them."""
    statistics, protector, report = BlockStatistics(0), Protector(plan.protection), progress.bar("rounding")
    for i, (name, w) in enumerate(dense.original.items()):
        block, inner = dense.inside(name)
        if statistics.block != block:
            statistics = BlockStatistics(block)
        chunk, salient = plan.header["chunk_size"], protector(block, inner, w)
        dense.set(name, quantize_matrix(w, statistics.moment(inner), plan.of(name), chunk, salient)[1])
        report(i + 1, len(dense.original))
