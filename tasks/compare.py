"""Stage 10: one table and the plots people look at.

Out: table.md, metrics.json (the plan's headline numbers), pareto.png, allocation.png, widths.png.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import plans, store
from tasks.job import Job, Record
from windquant.grids import WIDTHS

log = logging.getLogger("windquant")


@dataclass(frozen=True)
class CompareConfig:
    """dpi: of the pictures."""

    dpi: int = 120

    def __post_init__(self) -> None:
        if not 20 <= self.dpi <= 1000:
            raise ValueError(f"dpi {self.dpi} is not between 20 and 1000")


COLUMNS = ("method", "effective bits", "model MB", "perplexity", "KL", "accuracy", "hours")
MAKING = ("calibrate", "sensitivity", "supernet", "allocate")
"""Stages before `quantize` that a plan found on true losses needs; one from the distortion table needs the first two, the
uniform one the first."""
NEEDED = {"uniform": 1, "ppo": 4, "evolution": 4}

TRAINED = "-winq"
"""After a plan's name: its checkpoint was trained on."""


def run(config: CompareConfig, job: Job) -> Record:
    results = store.load_json(store.path("benchmark") / "results.json")
    sizes = {k: v for s in ("quantize", "finetune") for k, v in store.load_json(store.path(s) / "bytes.json").items()}
    manifest = store.load_json(store.path("prepare") / "manifest.json")
    found = {f.stem: plans.load_plan(f) for f in sorted(store.path("allocate").glob("*.parquet"))}
    runs = {s: store.load_json(store.run_record(s)) for s in (*MAKING, "quantize", "finetune")}
    rows = [_row(r, sizes, runs, manifest) for r in results["rows"]]
    best = min((r for r in rows if r["method"] in found), key=lambda r: r["perplexity"])
    chosen = store.load_json(store.path("allocate") / "summary.json")["chosen"]
    text = _markdown(rows, results["facts"], store.load_json(store.path("benchmark") / "completions.json"))
    (job.out / "table.md").write_text(text)
    metrics = _headline(next(r for r in results["rows"] if r["method"] == chosen), sizes[chosen], found[chosen])
    store.save_json(job.out / "metrics.json", metrics)
    _pareto(rows, job.out / "pareto.png", config.dpi)
    shown = [found[n] for n in dict.fromkeys((chosen, "lagrangian")) if n in found]
    _heat_maps(shown, job.out / "allocation.png", config.dpi)
    _shares(found, job.out / "widths.png", config.dpi)
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
            "comparison": {c: [r[c] for r in rows] for c in COLUMNS},
            "plan": plans.unit_columns(found[chosen].body) | {"bits": found[chosen].bits},
        },
        files=[job.out / n for n in ("table.md", "pareto.png", "allocation.png", "widths.png")],
    )


def _row(result: dict[str, Any], sizes: dict[str, Any], runs: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    name = result["method"]
    size = sizes.get(name)
    plan, trained, _ = name.partition(TRAINED)
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


def _markdown(rows: list[dict[str, Any]], facts: dict[str, Any], completions: dict[str, list[str]]) -> str:
    from tabulate import tabulate

    formats = ("", ".4f", ".1f", ".2f", ".3f", ".3f", ".2f")
    table = tabulate([[r[c] for c in COLUMNS] for r in rows], COLUMNS, tablefmt="github", floatfmt=formats)
    lines = [
        table,
        f"Effective bits count every stored byte of the quantized matrices; the reference is kept at 16 bits. Perplexity a "
        f"token on {facts['perplexity_windows']} windows of {facts['perplexity_window']} tokens, stride "
        f"{facts['perplexity_stride']}. Accuracy: mean over {facts['tasks']}. KL: to the reference, nats a token. Hours: to "
        f"make the checkpoint.",
        "## Greedy completions",
    ]
    names = [n for n in completions if n != "prompt"]
    for i, prompt in enumerate(completions["prompt"]):
        lines.append(f"> {prompt}")
        lines += [f"**{n}**: {' '.join(completions[n][i].split())}" for n in names]
    return "\n\n".join(lines) + "\n"


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Any, file: Path, dpi: int) -> None:
    figure.savefig(file, dpi=dpi, metadata={"Software": None})


def _pareto(rows: Sequence[dict[str, Any]], file: Path, dpi: int) -> None:
    figure, axes = _figure(7, 4.5)
    for r in rows:
        if r["method"] == "reference":
            axes.axhline(r["perplexity"], color="gray", linestyle=":", label=f"reference, {r['perplexity']:.1f}")
        else:
            axes.plot(r["effective bits"], r["perplexity"], "o", markersize=9, label=f"{r['method']}, {r['perplexity']:.1f}")
    axes.set(yscale="log", xlabel="effective bits a weight, every stored byte counted", ylabel="perplexity of the test text")
    bits = [r["effective bits"] for r in rows if r["method"] != "reference"]
    axes.set_xlim(min(bits) - 0.25, max(bits) + 0.25)
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    _save(figure, file, dpi)


def _heat_maps(found: Sequence[plans.Plan], file: Path, dpi: int) -> None:
    """Mean bits of every matrix, block by kind: plans side by side, on one scale."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(u.matrix.kind for u in found[0].body))
    means = [_mean_bits(plan, kinds) for plan in found]
    blocks = len(means[0])
    figure = Figure(figsize=((2.5 + 0.75 * len(kinds)) * len(found), 1.5 + 0.24 * blocks), layout="constrained")
    top = max(v for mean in means for row in mean for v in row if v == v)
    for plan, mean, axes in zip(found, means, figure.subplots(1, len(found), squeeze=False)[0], strict=True):
        image = axes.imshow(mean, aspect="auto", cmap="viridis", vmin=1, vmax=top)
        for i, row in enumerate(mean):
            for j, value in enumerate(row):
                color = "white" if value < 0.5 * top else "black"
                axes.text(j, i, f"{value:.1f}", ha="center", va="center", fontsize=7, color=color)
        axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
        axes.set_yticks(range(0, blocks, max(1, blocks // 15)))
        title = f"{plan.header['allocator']}, {plan.effective_bits:.3f} effective bits: mean bits a matrix"
        axes.set(ylabel="block", title=title)
    figure.colorbar(image, ax=figure.axes, label="bits")
    _save(figure, file, dpi)


def _mean_bits(plan: plans.Plan, kinds: list[str]) -> list[list[float]]:
    """(blocks, kinds); NaN where a block has no matrix of a kind."""
    blocks = sorted({u.matrix.block for u in plan.body})
    total = [[0.0] * len(kinds) for _ in blocks]
    weights = [[0] * len(kinds) for _ in blocks]
    for u, b in zip(plan.body, plan.bits, strict=True):
        i, j = blocks.index(u.matrix.block), kinds.index(u.matrix.kind)
        total[i][j] += b * u.weights
        weights[i][j] += u.weights
    return [[t / n if n else float("nan") for t, n in zip(*row, strict=True)] for row in zip(total, weights, strict=True)]


def _shares(found: dict[str, plans.Plan], file: Path, dpi: int) -> None:
    figure, axes = _figure(7, 4)
    width = 0.8 / len(found)
    for i, (name, plan) in enumerate(found.items()):
        shares = plan.shares()
        axes.bar([j + i * width for j in range(len(WIDTHS))], [100 * shares[w] for w in WIDTHS], width, label=name)
    axes.set_xticks([j + 0.4 - width / 2 for j in range(len(WIDTHS))], [f"{w:g}" for w in WIDTHS])
    axes.set(xlabel="bits", ylabel="share of the weights, %")
    axes.legend()
    _save(figure, file, dpi)
