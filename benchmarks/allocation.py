"""Allocators at equal effective bits: perplexity of held-out articles, plan by plan, after each treatment.

`rounding` to nearest on fitted scales, the engine's `feedback` and `reconstruction`. Searches start anew for every seed,
which the engine takes, too; for `rounding` their losses are of composed plans, else of error feedback. What does not depend
on a seed is made once. `uniform` spends the whole budget evenly;
`uniform-2` is one width everywhere, which leaves some of the budget unused. Uses the artifacts of prepare to supernet; rows
that are finished survive a kill.
"""

import shutil
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import ALL_TWO, Bench
from tasks import plans, store
from tasks.job import Job, Record
from tasks.searching import SEARCHES, Searching
from tasks.settings import load as load_params
from windquant import units

TARGETS = (2.25, 2.0)
TREATMENTS = ("rounding", "feedback", "reconstruction")
WAYS = ("uniform", "random", "sensitivity-rank", "lagrangian", *SEARCHES)


def run(seeds: int) -> tuple[list[dict[str, Any]], list[str]]:
    bench = Bench("allocation")
    rows = [_kept(bench, "uniform-2", ALL_TWO, "rounding", 0)]
    for target in TARGETS:
        for treatment in TREATMENTS:
            for allocator in WAYS:
                again = allocator in ("random", *SEARCHES) or (treatment == "reconstruction" and allocator == "lagrangian")
                if allocator in ("random", "sensitivity-rank") and treatment != "rounding":
                    continue
                rows += [_kept(bench, allocator, target, treatment, seed) for seed in range(seeds if again else 1)]
    return rows, _notes(rows)


def _kept(bench: Bench, allocator: str, target: float, treatment: str, seed: int) -> dict[str, Any]:
    key = f"{allocator}-{target:g}-{treatment}-{seed}"
    if not bench.kept.has_json(key):
        bench.kept.put_json(key, _row(bench, allocator, target, treatment, seed))
    return bench.kept.get_json(key)


def _row(bench: Bench, allocator: str, target: float, treatment: str, seed: int) -> dict[str, Any]:
    choice, evaluations = _choice(bench, allocator, target, "composed" if treatment == "rounding" else "feedback", seed)
    plan = bench.table.plan(choice)
    began = time.monotonic()
    bench.ours(plan, treatment, seed)
    seconds = time.monotonic() - began
    found = bench.dense.score(f"{allocator} {target:g} {treatment} {seed}")
    return {
        "allocator": allocator,
        "target": target,
        "treatment": treatment,
        "seed": seed,
        "effective_bits": units.effective_bits(plan.size, units.weights_in(plan.body)),
        "predicted_nats": float(bench.table.D.gather(1, choice[:, None]).sum()),
        "evaluations": evaluations,
        "nll": found.nll,
        "perplexity": found.perplexity,
        "seconds": seconds,
    }


def _choice(bench: Bench, allocator: str, target: float, loss: str, seed: int) -> tuple[Tensor, int]:
    """A plan, and the true losses that it took. Searches are kept, so that none is made twice."""
    if allocator not in SEARCHES:
        return bench.choice(allocator.removesuffix("-2"), target, seed), 0
    key = f"plan-{allocator}-{target:g}-{loss}-{seed}"
    if not bench.kept.has(key):
        job = _job(bench, target, loss, seed)
        for name, found in _search(bench.table, target, loss, job).items():
            bench.kept.put(f"plan-{name}-{target:g}-{loss}-{seed}", found)
        job.scratch.clear()
    kept = bench.kept.get(key)
    return kept["choice"].long(), int(kept["evaluations"])


def _job(bench: Bench, target: float, loss: str, seed: int) -> Job:
    params = load_params()
    name = f"benchmark-search-{target:g}-{loss}-{seed}"
    out = store.state(name) / "out"
    out.mkdir(parents=True, exist_ok=True)
    hashes = [store.hash_tree(store.path(s)) for s in ("prepare", "calibrate", "supernet")]
    fingerprint = " ".join([bench.made_with, *hashes, repr(params.allocate)])
    return Job("allocate", replace(params.common, seed=seed), out, store.Scratch(name, fingerprint))


def _search(table: plans.Table, target: float, loss: Any, job: Job) -> dict[str, dict[str, Tensor]]:
    """PPO, and evolution with as many true losses."""
    config = replace(load_params().allocate, allocator="ppo", loss=loss, target_bits=target, target_size=None)
    searching = Searching(config, table, target, job, Record())
    ppo = searching.ppo()
    found = {"ppo": ppo, "evolution": searching.evolution(ppo.evaluations)}
    shutil.rmtree(job.out)
    return {
        name: {"choice": f.choice.to(torch.uint8), "evaluations": torch.tensor(f.evaluations)} for name, f in found.items()
    }


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    notes = []
    for target in TARGETS:
        for treatment in TREATMENTS:
            by = {
                name: [r["perplexity"] for r in rows
                       if (r["allocator"], r["target"], r["treatment"]) == (name, target, treatment)]
                for name in WAYS
            }  # fmt: skip
            base = sum(by["lagrangian"]) / len(by["lagrangian"])
            for name, found in by.items():
                if found and name != "lagrangian":
                    mean, worst = sum(found) / len(found) / base, max(found) / base
                    notes.append(
                        f"{target:g} bits, {treatment}: {name} / lagrangian {mean:.3f}x perplexity, at worst {worst:.3f}x"
                    )
    return notes
