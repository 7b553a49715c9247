"""Stage 11: one table and the plots people look at.

Out: table.md, metrics.json (the plan's headline numbers), pareto.png, allocation.png, widths.png.
"""

import logging
from dataclasses import dataclass
from typing import Any

from tasks import peers, pictures, plans, published, store, tables
from tasks.job import Job, Record

log = logging.getLogger("windquant")


@dataclass(frozen=True)
class CompareConfig:
    """dpi: of the pictures."""

    dpi: int = 120

    def __post_init__(self) -> None:
        if not 20 <= self.dpi <= 1000:
            raise ValueError(f"dpi {self.dpi} is not between 20 and 1000")


MAKING = ("calibrate", "sensitivity", "supernet", "allocate")
"""Stages before `quantize` that a plan found on true losses needs; one from the distortion table needs the first two, the
uniform one the first."""
NEEDED = {"uniform": 1, "ppo": 4, "evolution": 4}


def run(config: CompareConfig, job: Job) -> Record:
    results = store.load_json(store.path("benchmark") / "results.json")
    sizes = {k: v for s in ("quantize", "finetune") for k, v in store.load_json(store.path(s) / "bytes.json").items()}
    manifest = store.load_json(store.path("prepare") / "manifest.json")
    found = {f.stem: plans.load_plan(f) for f in sorted(store.path("allocate").glob("*.parquet"))}
    runs = {s: store.load_json(store.run_record(s)) for s in (*MAKING, "quantize", "finetune")}
    hashes = {k: manifest[k] for k in ("model_hash", "text_hash", "windows_hash")}
    asked = job.section("baselines")
    others = peers.load(results["facts"] | hashes, asked.settings(job.common.seed), asked.variants)
    rows = [_row(r, sizes, runs, manifest) for r in results["rows"]] + [_peer(r) for r in others.rows]
    best = min((r for r in rows if r["method"] in found), key=lambda r: r["perplexity"])
    chosen = store.load_json(store.path("allocate") / "summary.json")["chosen"]
    completions = store.load_json(store.path("benchmark") / "completions.json")
    text = tables.markdown(rows, others.missing, results["facts"], completions)
    (job.out / "table.md").write_text(text)
    metrics = _headline(next(r for r in results["rows"] if r["method"] == chosen), sizes[chosen], found[chosen])
    store.save_json(job.out / "metrics.json", metrics)
    pictures.pareto(rows, job.out / "pareto.png", config.dpi)
    shown = [found[n] for n in dict.fromkeys((chosen, "lagrangian")) if n in found]
    pictures.heat_maps(shown, job.out / "allocation.png", config.dpi)
    pictures.shares(found, job.out / "widths.png", config.dpi)
    log.info("\n%s", text.split("\n\n")[0])
    log.info("lowest perplexity at this target: %s", best["method"])
    if best["method"] != chosen:
        log.warning("%s loses to %s: perplexity %.2f, %.2f", chosen, best["method"],
                    next(r["perplexity"] for r in rows if r["method"] == chosen), best["perplexity"])  # fmt: skip
    header = found[chosen].header
    params = results["facts"] | {k: header[k] for k in ("allocator", "chunk_size", "model_hash", "seed")}
    params |= {"method": chosen, "text_hash": manifest["text_hash"], "target_bits": round(header["target_bits"], 6)}
    store.save_json(job.out / "params.json", params)
    return Record(
        metrics=metrics,
        params=params,
        tables={
            "comparison": {c: [r[c] for r in rows] for c in tables.COLUMNS},
            "missing": {"method": list(others.missing), "reason": list(others.missing.values())},
            "plan": plans.unit_columns(found[chosen].body) | {"bits": found[chosen].bits},
        },
        files=[job.out / n for n in ("table.md", "pareto.png", "allocation.png", "widths.png")],
        published={row.name: row.record() for row in published.ROWS},
    )


def _row(result: dict[str, Any], sizes: dict[str, Any], runs: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    name = result["method"]
    size = sizes.get(name)
    plan, trained, _ = name.partition(plans.TRAINED)
    needed = [*MAKING[: NEEDED.get(plan, 2)], "quantize", *(["finetune"] if trained else [])]
    seconds = sum(runs[s]["wall_seconds"] for s in MAKING[: NEEDED.get(plan, 2)])
    seconds += runs["quantize"]["seconds"].get(plan, 0) + (runs["finetune"]["wall_seconds"] if trained else 0)
    return {
        "method": name,
        "effective bits": size["effective_bits"] if size else 16.0,
        "model MB": (size["model"] if size else 2 * manifest["parameters"]) / 1e6,
        "perplexity": result["perplexity"],
        "KL": result["kl_to_reference"],
        "accuracy": result["acc_mean"],
        "hours": seconds / 3600 if size else 0.0,
        "peak GiB": max(runs[s]["peak_gpu_gib"] or runs[s]["peak_rss_gib"] for s in needed) if size else None,
        "baseline": False,
    }


def _peer(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "method": row["variant"],
        "effective bits": row["effective_bits"],
        "model MB": row["model_bytes"] / 1e6,
        "perplexity": row["perplexity"],
        "KL": row["kl_to_reference"],
        "accuracy": row["acc_mean"],
        "hours": row["seconds"] / 3600,
        "peak GiB": row["peak_gib"],
        "baseline": True,
    }


def _headline(result: dict[str, Any], size: dict[str, Any], plan: plans.Plan) -> dict[str, float]:
    """design's vocabulary: the same keys in every run."""
    breakdown = {f"bytes/{k}": float(size[k]) for k in
                 ("codes", "scales", "salient", "plan", "padding", "embeddings", "head", "other", "header")}  # fmt: skip
    return {
        **{k: v for k, v in result.items() if isinstance(v, float)},
        "effective_bits": size["effective_bits"],
        "effective_bits_model": size["effective_bits_model"],
        "effective_bits_paper": size["effective_bits_paper"],
        "target_bits": plan.header["target_bits"],
        "model_bytes": float(size["model"]),
        **breakdown,
        **{f"bits_share/{w:g}": s for w, s in plan.shares().items()},
    }
