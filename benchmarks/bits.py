"""Effective bits recounted from the bytes on disk, beside what MLflow was told and what was asked for."""

from typing import Any

from tasks import plans, store, tracking
from windquant import checkpoint


def run(seeds: int) -> tuple[list[dict[str, Any]], list[str]]:
    logged = tracking.children_of(store.load_json(store.run_record("quantize"))["mlflow_run"])
    rows = []
    for folder in sorted(p for p in store.path("quantize").iterdir() if p.is_dir()):
        counted = checkpoint.count(folder)
        rows.append(
            {
                "method": folder.name,
                "target": plans.load_plan(folder / "plan.parquet").header["target_bits"],
                "logged": logged[folder.name]["effective_bits"],
                "recounted": counted.effective_bits,
                "codes": counted.codes,
                "scales": counted.scales,
                "salient": counted.salient,
                "plan": counted.plan,
                "padding": counted.padding,
                "embeddings": counted.embeddings,
                "model_bytes": counted.model,
                "effective_bits_model": counted.effective_bits_model,
            }
        )
    worst = max(abs(r["logged"] / r["recounted"] - 1) for r in rows)
    over = [r["method"] for r in rows if r["recounted"] > r["target"]]
    return rows, [f"largest difference logged - recounted: {worst:.2%}; over the target: {', '.join(over) or 'none'}"]
