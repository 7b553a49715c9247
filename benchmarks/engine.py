"""Ways to round at given bits, and auto-round beside them: perplexity of held-out articles, seconds, bits all counted.

Treatments: `rounding` to nearest on fitted scales (`starting-scales`: on the papers' own), and the engine's `feedback` and
`reconstruction`. auto-round (`pip install -e '.[baselines]'`) runs from its own package, group 64, asymmetric, as many
steps, on the same calibration tokens. Uses the artifacts of prepare, calibrate and sensitivity; rows that are finished
survive a kill.
"""

import hashlib
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.dense import Dense, on_starting_scales, round_to_nearest
from tasks import models, plans, progress, signround, store
from tasks.settings import load as load_params
from tasks.statistics import Protector
from windquant.allocate import ALLOCATORS, Problem
from windquant.engine import Engine
from windquant.grids import WIDTHS
from windquant.reconstruct import ReconstructConfig
from windquant.units import effective_bits

WINDOWS, TOKENS, STEPS, BATCH, GROUP = 32, 256, 50, signround.BATCH, 64
ALL_TWO = 0.0
"""Stands for the bits that 2 bits everywhere take; all of the allocators' other targets are effective bits."""
CASES = [
    ("reference", 16.0, "none"),
    ("uniform", ALL_TWO, "starting-scales"),
    *((allocator, 2.25, treatment) for treatment in ("rounding", "feedback") for allocator in ("uniform", "lagrangian")),
    ("lagrangian", 2.25, "reconstruction"),
    ("uniform", ALL_TWO, "reconstruction"),
    ("auto-round", 2, "reconstruction"),
    ("lagrangian", 2.0, "reconstruction"),
    ("uniform", 3.25, "reconstruction"),
    ("auto-round", 3, "reconstruction"),
]


def run(seeds: int) -> tuple[list[dict[str, Any]], list[str]]:
    bench = Bench()
    rows = []
    for allocator, target, treatment in CASES:
        for seed in range(seeds if treatment == "reconstruction" and allocator != "auto-round" else 1):
            key = f"{allocator}-{target:g}-{treatment}-{seed}"
            if not bench.kept.has_json(key):
                bench.kept.put_json(key, bench.row(allocator, target, treatment, seed))
            rows.append(bench.kept.get_json(key))
    return rows, _notes(rows)


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    def mean(column: str, *key: Any) -> float:
        found = [r[column] for r in rows if (r["allocator"], r["target"], r["treatment"]) == key]
        return sum(found) / len(found)

    def ratio(column: str, ours: tuple[Any, ...], other: tuple[Any, ...]) -> float:
        return mean(column, *ours) / mean(column, *other)

    feedback, peer = ("uniform", 2.25, "feedback"), ("auto-round", 2, "reconstruction")
    notes = [
        f"{' '.join(map(str, case))} / uniform 2.25 feedback: {ratio('perplexity', case, feedback):.4g}x perplexity"
        for case in (
            ("uniform", ALL_TWO, "starting-scales"),
            ("uniform", 2.25, "rounding"),
            ("lagrangian", 2.25, "feedback"),
        )
    ]
    for case in (("lagrangian", 2.25), ("uniform", ALL_TWO), ("lagrangian", 2.0)):
        ours = (*case, "reconstruction")
        notes.append(
            f"{case[0]} {case[1]:g} / auto-round 2, both reconstruction: {ratio('perplexity', ours, peer):.3f}x perplexity, "
            f"{ratio('seconds', ours, peer):.2f}x time"
        )
    wide = ratio("perplexity", ("uniform", 3.25, "reconstruction"), ("auto-round", 3, "reconstruction"))
    return [*notes, f"uniform 3.25 / auto-round 3: {wide:.3f}x perplexity"]


class Bench:
    """What rows are made with. kept: rows that survive a kill, under `name`, while library and table stay the same."""

    def __init__(self, name: str = "engine") -> None:
        prepared = store.path("prepare")
        self.table = plans.load_distortions(store.path("sensitivity") / "table.parquet")
        self.chunk = self.table.header["chunk_size"]
        self.ids = store.load_tensors(prepared / "windows" / "calibration.safetensors")["ids"][:WINDOWS, :TOKENS].long()
        self.dense = Dense(load_params().benchmark.windows or 0)
        code = hashlib.sha256(store.hash_tree(store.path("sensitivity")).encode())
        own = [*sorted(store.Path("windquant").glob("*.py")), store.Path("tasks/searching.py")]
        code.update(b"".join(f.read_bytes() for f in own))
        self.made_with = code.hexdigest()
        self.kept = store.Scratch(f"benchmark-{name}", self.made_with)

    def row(self, allocator: str, target: float, treatment: str, seed: int) -> dict[str, Any]:
        label, began = f"{allocator} {target:g} {treatment}", time.monotonic()
        if allocator == "auto-round":
            bits = self._auto_round(int(target), seed)
        elif allocator == "reference":
            bits = target
        else:
            bits = self.ours(self.table.plan(self.choice(allocator, target, 0)), treatment, seed)
        seconds = time.monotonic() - began
        found = self.dense.score(label)
        return {
            "method": allocator if allocator in ("auto-round", "reference") else "windquant",
            "allocator": allocator,
            "target": target,
            "treatment": treatment,
            "effective_bits": bits,
            "nll": found.nll,
            "perplexity": found.perplexity,
            "seed": seed,
            "seconds": seconds,
        }

    def choice(self, allocator: str, target: float, seed: int) -> Tensor:
        table = self.table
        budget = int(table.B[:, WIDTHS.index(2)].sum()) if target == ALL_TWO else table.budget(target)
        return ALLOCATORS[allocator](Problem(table.D, table.B, budget), torch.Generator().manual_seed(seed))

    def ours(self, plan: plans.Plan, treatment: str, seed: int) -> float:
        if treatment == "starting-scales":
            plan = replace(plan, header=plan.header | {"salient": "none"})
            for name, w in self.dense.original.items():
                self.dense.set(name, on_starting_scales(w, plan.of(name), self.chunk))
        elif treatment == "rounding":
            round_to_nearest(self.dense, plan)
        else:
            config = ReconstructConfig(STEPS, BATCH) if treatment == "reconstruction" else None
            walk = models.walk(store.path("prepare") / "model", torch.device("cpu"))
            memory, protect = store.Memory(), Protector(plan.protection)
            engine = Engine(walk, plan.of, self.chunk, config, seed, memory, "plan", print, protect)
            for block in engine.run(self.ids, progress.bar(f"{treatment}, {plan.effective_bits:.3f} bits")):
                for name, packed in block.items():
                    self.dense.set(name, packed.dequantize())
        return plan.effective_bits

    def _auto_round(self, bits: int, seed: int) -> float:
        size = 0
        for block in signround.quantize(store.path("prepare") / "model", self.ids, bits, GROUP, STEPS, seed):
            for name, stored in block.items():
                self.dense.set(name, stored.dequantize())
                size += sum(t.nbytes for t in stored.tensors().values())
        return effective_bits(size, sum(w.numel() for w in self.dense.original.values()))
