"""Stage 4: a plan for the target, and the uniform one of the same size beside it.

Out: <allocator>.parquet and uniform.parquet.
"""

import logging
from dataclasses import replace

from tasks import plans, store
from tasks.errors import UserError
from tasks.job import Job, Record
from tasks.plans import Plan
from tasks.reach import Reach
from windquant.allocate import ALLOCATORS, AllocateConfig, Problem

log = logging.getLogger("windquant")


def run(config: AllocateConfig, job: Job) -> Record:
    table = plans.load_distortions(store.path("sensitivity") / "table.parquet")
    reach = Reach.of(table.body, _other_bytes(table, config), table.header["chunk_size"], table.protection)
    target = reach.target_bits(config)
    record = Record(params={"target_bits": round(target, 6), "chunk_size": reach.chunk_size})
    for name in dict.fromkeys((config.allocator, "uniform")):
        beside = {"other_bytes": reach.other_bytes, "embedding_bits": config.embedding_bits}
        plan, distortion = _solve(name, replace(table, header=table.header | beside), target, job)
        plans.save_plan(job.out / f"{name}.parquet", plan, distortion)
        shares = ", ".join(f"{100 * s:.0f} % at {b:g}" for b, s in plan.shares().items() if s)
        log.info("%-16s %.4f effective bits of %.4f, %.3f predicted nats; weights: %s",
                 name, plan.effective_bits, target, sum(distortion), shares)  # fmt: skip
        record.metrics |= {
            f"effective_bits/{name}": plan.effective_bits,
            f"predicted_nats/{name}": sum(distortion),
        }
        record.tables[f"plan_{name}"] = plans.unit_columns(plan.body) | {"bits": plan.bits, "distortion": distortion}
    return record


def _other_bytes(table: plans.Table, config: AllocateConfig) -> int:
    found = table.header["other_bytes"].get("null" if config.embedding_bits is None else str(config.embedding_bits))
    if found is None:
        raise UserError(
            f"allocate.embedding_bits is {config.embedding_bits}, but this model's embeddings are of a class of their own, "
            f"which cannot be packed; set it to null"
        )
    return found


def _solve(name: str, table: plans.Table, target: float, job: Job) -> tuple[Plan, list[float]]:
    try:
        problem = Problem(table.D, table.B, table.budget(target))
    except ValueError as e:
        raise UserError(str(e)) from e
    choice = ALLOCATORS[name](problem, job.generator())
    plan = table.plan(choice, target_bits=target, allocator=name, seed=job.common.seed)
    if plan.size > problem.budget + table.salient_bytes:
        raise AssertionError(f"allocator {name} spent {plan.size} bytes of {problem.budget + table.salient_bytes}")
    return plan, table.D.gather(1, choice[:, None])[:, 0].tolist()
