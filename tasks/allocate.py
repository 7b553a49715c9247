"""Stage 5: a plan for the target, and the uniform one of the same size beside it.

Out: <allocator>.parquet and uniform.parquet, with a search lagrangian.parquet, too, the plan it has to beat;
policy.safetensors and policy.json, what PPO learned. summary.json says which plan is the one asked for, and how all
allocators do at equal bits on true losses.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tasks import plans, store
from tasks.errors import UserError
from tasks.job import Job, Record
from tasks.plans import Plan
from tasks.reach import Reach
from tasks.searching import SEARCHES, AllocateConfig, Found, Searching
from windquant.allocate import ALLOCATORS, Problem

log = logging.getLogger("windquant")
RANDOM = 5
"""Plans drawn by `random`, of which the comparison gives the mean."""


def run(config: AllocateConfig, job: Job) -> Record:
    table = plans.load_distortions(store.path("sensitivity") / "table.parquet")
    reach = Reach.of(table.body, _other_bytes(table, config), table.header["chunk_size"], table.protection)
    target = reach.target_bits(config)
    table = replace(table, header=table.header | {"other_bytes": reach.other_bytes, "embedding_bits": config.embedding_bits})
    record = Record(params={"target_bits": round(target, 6), "chunk_size": reach.chunk_size})
    names = dict.fromkeys((config.allocator, "uniform"))
    made = {name: _solve(name, table, target, job.generator()) for name in names if name not in SEARCHES}
    if config.allocator in SEARCHES:
        searching = Searching(config, table, target, job, record)
        rows = dict(_compare(searching, job))
        made |= {name: rows[name].choice for name in (config.allocator, "lagrangian")}
        compared = _report(rows, searching.problem(target), record)
    else:
        compared = {}
    store.save_json(job.out / "summary.json", {"chosen": config.allocator, "compared": compared})
    for name, choice in made.items():
        plan = table.plan(choice, target_bits=target, allocator=name, seed=job.common.seed)
        _save(name, plan, table.D.gather(1, choice[:, None])[:, 0].tolist(), record, job)
    return record


def _save(name: str, plan: Plan, distortion: list[float], record: Record, job: Job) -> None:
    if not plan.effective_bits <= plan.header["target_bits"]:
        raise AssertionError(f"allocator {name} spent {plan.effective_bits} bits of {plan.header['target_bits']}")
    plans.save_plan(job.out / f"{name}.parquet", plan, distortion)
    shares = ", ".join(f"{100 * s:.0f} % at {b:g}" for b, s in plan.shares().items() if s)
    log.info("%-16s %.4f effective bits of %.4f, %.3f predicted nats; weights: %s",
             name, plan.effective_bits, plan.header["target_bits"], sum(distortion), shares)  # fmt: skip
    record.metrics |= {f"effective_bits/{name}": plan.effective_bits, f"predicted_nats/{name}": sum(distortion)}
    record.tables[f"plan_{name}"] = plans.unit_columns(plan.body) | {"bits": plan.bits, "distortion": distortion}


def _compare(searching: Searching, job: Job) -> Iterator[tuple[str, Found]]:
    """Every allocator at the target, the searches with as many true losses each."""
    problem, own = searching.problem(searching.target), searching.config.allocator
    for name in ALLOCATORS:
        generator, began = job.generator(), time.monotonic()
        drawn = [ALLOCATORS[name](problem, generator) for _ in range(RANDOM if name == "random" else 1)]
        seconds = (time.monotonic() - began) / len(drawn)
        found = searching.score(torch.stack(drawn))
        mean = {what: sum(getattr(f, what) for f in found) / len(found) for what in ("loss", "confirmed")}
        yield name, replace(found[0], seconds=seconds, **mean)
    if own == "ppo":
        found = searching.ppo()
        yield "ppo", found
        yield "evolution", searching.evolution(found.evaluations)
    else:
        yield "evolution", searching.evolution(1 + searching.config.losses * searching.config.rollouts)


def _report(rows: dict[str, Found], problem: Problem, record: Record) -> dict[str, list[Any]]:
    columns = {
        "allocator": list(rows),
        "budget_used": [problem.size(f.choice) / problem.budget for f in rows.values()],
        "kl": [f.loss for f in rows.values()],
        "kl_other_text": [f.confirmed for f in rows.values()],
        "evaluations": [f.evaluations for f in rows.values()],
    }
    record.tables["allocators"] = columns | {"seconds": [f.seconds for f in rows.values()]}
    for name, f in rows.items():
        record.metrics |= {f"kl/{name}": f.loss, f"kl_other_text/{name}": f.confirmed, f"seconds/{name}": f.seconds}
        log.info("%-16s KL %.4f on the search's text, %.4f on other text, %d true losses", name, f.loss, f.confirmed,
                 f.evaluations)  # fmt: skip
    best = min(rows, key=lambda name: rows[name].confirmed)
    for name in SEARCHES:
        if name in rows and rows[name].confirmed > rows[best].confirmed:
            log.warning("%s loses to %s on other text, by %.4f nats", name, best,
                        rows[name].confirmed - rows[best].confirmed)  # fmt: skip
    record.tags["winner"] = best
    return columns


def _other_bytes(table: plans.Table, config: AllocateConfig) -> int:
    found = table.header["other_bytes"].get("null" if config.embedding_bits is None else str(config.embedding_bits))
    if found is None:
        raise UserError(
            f"allocate.embedding_bits is {config.embedding_bits}, but this model's embeddings are of a class of their own, "
            f"which cannot be packed; set it to null"
        )
    return found


def _solve(name: str, table: plans.Table, target: float, generator: torch.Generator) -> torch.Tensor:
    try:
        return ALLOCATORS[name](Problem(table.D, table.B, table.budget(target)), generator)
    except ValueError as e:
        raise UserError(str(e)) from e
