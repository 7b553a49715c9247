"""Salient weights in INT8 at equal effective bits: perplexity of held-out articles after reconstruction of lagrangian plans.

Every way to protect has a distortion table and plans of its own, in whose budget its bytes are counted. Uses the artifacts
of prepare, calibrate and sensitivity; rows that are finished survive a kill.
"""

from dataclasses import replace
from typing import Any

import torch

from benchmarks.engine import Bench
from tasks import models, plans, sensitivity, store
from tasks.statistics import Protector
from windquant.allocate import Problem, lagrangian
from windquant.salient import Mode, protection

TARGETS = (2.25, 2.0)
WAYS: tuple[tuple[Mode, float], ...] = (
    ("none", 0.0),
    ("weights", 0.005),
    ("weights", 0.03),
    ("columns", 0.01),
    ("columns", 0.03),
)


def run(seeds: int) -> tuple[list[dict[str, Any]], list[str]]:
    bench, rows = Bench("salient"), []
    for mode, share in WAYS:
        table = None
        for target in TARGETS:
            for seed in range(seeds):
                key = f"{mode}-{share:g}-{target:g}-{seed}"
                if not bench.kept.has_json(key):
                    table = table or _table(bench.table, mode, share)
                    bench.kept.put_json(key, _row(bench, table, target, seed))
                rows.append(bench.kept.get_json(key))
    return rows, _notes(rows)


def _table(base: plans.Table, mode: Mode, share: float) -> plans.Table:
    walk = models.walk(store.path("prepare") / "model", torch.device("cpu"))
    protector, label = Protector(protection(mode, share)), f"distortions with {share:.1%} in INT8 ({mode})"
    found = sensitivity.of_units(walk, base.header["chunk_size"], protector, store.Memory(), label)
    header = base.header | {"salient": mode, "salient_share": share}
    return replace(base, D=found["D"], header=header, salient=found["salient"].tolist())


def _row(bench: Bench, table: plans.Table, target: float, seed: int) -> dict[str, Any]:
    plan = table.plan(lagrangian(Problem(table.D, table.B, table.budget(target)), torch.Generator().manual_seed(0)))
    bench.ours(plan, "reconstruction", seed)
    mode, share = plan.header["salient"], plan.header["salient_share"]
    found = bench.dense.score(f"{share:.1%} in INT8 ({mode}), {target:g} bits")
    return {"salient": mode, "share": share, "target": target, "seed": seed,
            "effective_bits": plan.effective_bits, "nll": found.nll, "perplexity": found.perplexity}  # fmt: skip


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    def nll(mode: str, share: float, target: float) -> float:
        found = [r["nll"] for r in rows if (r["salient"], r["share"], r["target"]) == (mode, share, target)]
        return sum(found) / len(found)

    return [
        f"{target:g} bits, {mode} {share:.1%}: {nll(mode, share, target) - nll(*WAYS[0], target):+.4f} nats against none"
        for target in TARGETS
        for mode, share in WAYS[1:]
    ]
