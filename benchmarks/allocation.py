"""Allocators at equal effective bits: every plan rounded to nearest on fitted scales, perplexity of held-out articles.

Uses the artifacts of prepare, calibrate and sensitivity. `uniform` spends the whole budget evenly; `uniform-2` is one
width everywhere, which leaves some of the budget unused. `papers-2` is the same plan on the papers' starting scales.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from tasks import models, plans, progress, store
from tasks.settings import load as load_params
from tasks.statistics import BlockStatistics
from windquant import blocks, units
from windquant.allocate import ALLOCATORS, Problem
from windquant.evaluate import score
from windquant.grids import GRIDS, WIDTHS, decode, encode, start_scale
from windquant.quantize import quantize_matrix
from windquant.sensitivity import split


def run(seeds: int) -> tuple[list[dict[str, Any]], list[str]]:
    params = load_params()
    table = plans.load_distortions(store.path("sensitivity") / "table.parquet")
    target = params.allocate.target_bits
    problem = Problem(table.D, table.B, units.budget_bytes(target, table.body))
    bench = Bench(table, problem, params.benchmark.windows or 0)
    rows = [bench.row("reference", None, 0, target)]
    for name, allocator in ALLOCATORS.items():
        for seed in range(seeds if name == "random" else 1):
            choice = allocator(problem, torch.Generator().manual_seed(seed))
            rows.append(bench.row(name, choice, seed, target))
    two = torch.full((len(table.body),), WIDTHS.index(2))
    rows += [bench.row("uniform-2", two, 0, target), bench.row("papers-2", two, 0, target, fitted=False)]
    by = {r["allocator"]: r["perplexity"] for r in rows}
    return rows, [
        f"{name} / lagrangian: {by[name] / by['lagrangian']:.1f}x perplexity"
        for name in ("uniform", "uniform-2", "papers-2", "sensitivity-rank")
    ]


class Bench:
    """The reference in memory, its matrices replaced by each plan's in turn."""

    def __init__(self, table: plans.Table, problem: Problem, windows: int) -> None:
        prepared = store.path("prepare")
        self.table, self.problem, self.chunk = table, problem, table.header["chunk_size"]
        self.model = models.load(prepared / "model", torch.device("cpu"))
        ids = store.load_tensors(prepared / "windows" / "test.safetensors")["ids"]
        self.windows = ids[: windows or None].long()
        self.stride = store.load_json(prepared / "manifest.json")["eval_stride"]
        self.prefix = blocks.decoder_blocks(self.model)[0]
        self.original = {m.name: self._linear(m.name).weight.detach().clone() for m in blocks.matrices(self.model)}

    def _linear(self, name: str) -> nn.Linear:
        found = self.model.get_submodule(name)
        assert isinstance(found, nn.Linear)
        return found

    def row(self, allocator: str, choice: Tensor | None, seed: int, target: float, fitted: bool = True) -> dict[str, Any]:
        began = time.monotonic()
        size = predicted = None
        if choice is not None:
            predicted = self.problem.distortion(choice) if fitted else None
            self._apply([WIDTHS[c] for c in choice.tolist()], fitted, allocator)
            size = self.problem.size(choice)
        found = score(self.model, self.windows, self.stride, report=progress.bar(f"perplexity of {allocator}"))
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

    def _apply(self, bits: list[float], fitted: bool, label: str) -> None:
        plan = plans.Plan(self.table.body, bits, self.table.header)
        statistics, report = BlockStatistics(0), progress.bar(f"rounding {label}")
        for i, (name, w) in enumerate(self.original.items()):
            matrix = name.removeprefix(f"{self.prefix}.")
            block, _, inner = matrix.partition(".")
            if statistics.block != int(block):
                statistics = BlockStatistics(int(block))
            if fitted:
                rounded = quantize_matrix(w, statistics.moment(inner), plan.of(name), self.chunk)[1]
            else:
                rounded = _on_starting_scales(w, plan.of(name)[0], self.chunk)
            self._linear(name).weight.data.copy_(rounded)
            report(i + 1, len(self.original))


def _on_starting_scales(w: Tensor, bits: float, chunk: int) -> Tensor:
    grid = GRIDS[bits]
    parts = []
    for stack in split(w, chunk):
        s = start_scale(stack, grid)
        parts += list(decode(encode(stack, s, grid), s, grid))
    return torch.cat(parts, 1)
