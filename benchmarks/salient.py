"""Salient weights in INT8 at equal effective bits: perplexity of held-out articles after reconstruction of lagrangian plans.

Every way to protect has a distortion table and plans of its own, in whose budget its bytes are counted. Uses the artifacts
of prepare, calibrate and sensitivity; rows that are finished survive a kill.
"""

from typing import Any

import torch

from benchmarks.engine import Bench, plan_of
from tasks import models, plans, progress, sensitivity, store
from tasks.statistics import Protector
from windquant import units
from windquant.salient import Protection

TARGETS = (2.25, 2.0)
WAYS = (
    None,
    Protection("weights", 0.005),
    Protection("weights", 0.03),
    Protection("columns", 0.01),
    Protection("columns", 0.03),
)


def run(seeds: int) -> tuple[list[dict[str, Any]], list[str]]:
    bench, rows = Bench("salient"), []
    for way in WAYS:
        table = None
        for target in TARGETS:
            for seed in range(seeds):
                key = f"{way.mode}-{way.share:g}-{target:g}-{seed}" if way else f"none-{target:g}-{seed}"
                if not bench.kept.has_json(key):
                    table = table or _table(bench.table, way)
                    bench.kept.put_json(key, _row(bench, table, way, target, seed))
                rows.append(bench.kept.get_json(key))
    return rows, _notes(rows)


def _table(base: plans.Table, way: Protection | None) -> plans.Table:
    walk = models.walk(store.path("prepare") / "model", torch.device("cpu"))
    report, chunk, found = progress.bar(f"distortions, {_name(way)}"), base.header["chunk_size"], []
    for i in range(len(walk)):
        found.append(sensitivity.block(walk, i, chunk, Protector(way)))
        report(i + 1, len(walk))
    D, salient = (torch.cat([f[key] for f in found]) for key in ("D", "salient"))
    header = {"salient": way.mode, "salient_share": way.share} if way else {"salient": "none", "salient_share": 0.0}
    return plans.Table(base.body, D, base.B, base.header | header, salient.tolist())


def _row(bench: Bench, table: plans.Table, way: Protection | None, target: float, seed: int) -> dict[str, Any]:
    plan = plan_of("lagrangian", table, units.budget_bytes(target, table.body, table.salient_bytes))
    bench.ours(plan, "reconstruction", seed)
    found = bench.dense.score(f"{_name(way)}, {target:g} bits")
    return {"salient": way.mode if way else "none", "share": way.share if way else 0.0, "target": target, "seed": seed,
            "effective_bits": plan.effective_bits, "nll": found.nll, "perplexity": found.perplexity}  # fmt: skip


def _name(way: Protection | None) -> str:
    return f"{way.share:.1%} {way.mode} in INT8" if way else "nothing in INT8"


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    notes = []
    for target in TARGETS:
        means: dict[tuple[str, float], list[float]] = {}
        for r in rows:
            if r["target"] == target:
                means.setdefault((r["salient"], r["share"]), []).append(r["nll"])
        base = sum(means["none", 0.0]) / len(means["none", 0.0])
        notes += [
            f"{target:g} bits, {mode} {share:.1%}: {sum(nll) / len(nll) - base:+.4f} nats against none"
            for (mode, share), nll in means.items()
            if mode != "none"
        ]
    return notes
