"""The pictures of `compare`: bits against quality, the plans as heat maps, the widths they use."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks import plans
from tasks.figures import panels, save
from windquant.grids import WIDTHS


def pareto(rows: Sequence[dict[str, Any]], file: Path, dpi: int) -> None:
    """Effective bits against perplexity, and against mean accuracy; methods at several bits as one line."""
    figure, (left, right) = panels(2, 13, 5)
    methods: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        methods.setdefault(r["method"].rpartition("-")[0] if r["baseline"] else r["method"], []).append(r)
    bits = [r["effective bits"] for r in rows if r["method"] != "reference"]
    for axes, of in ((left, "perplexity"), (right, "accuracy")):
        for name, points in methods.items():
            points = sorted(points, key=lambda r: r["effective bits"])
            if name == "reference":
                axes.axhline(points[0][of], color="gray", linestyle=":", label=f"reference, {points[0][of]:.3g}")
                continue
            style = "s--" if points[0]["baseline"] else "o"
            axes.plot([r["effective bits"] for r in points], [r[of] for r in points], style, markersize=8, label=name)
        axes.set(xlabel="effective bits a weight, every stored byte counted", xlim=(min(bits) - 0.25, max(bits) + 0.25))
        axes.grid(alpha=0.3, which="both")
    left.set(yscale="log", ylabel="perplexity of the test text")
    right.set(ylabel="mean accuracy")
    left.legend()
    save(figure, file, dpi)


def heat_maps(found: Sequence[plans.Plan], file: Path, dpi: int) -> None:
    """Mean bits of every matrix, block by kind: plans side by side, on one scale."""
    kinds = list(dict.fromkeys(u.matrix.kind for u in found[0].body))
    means = [_mean_bits(plan, kinds) for plan in found]
    blocks = len(means[0])
    figure, side_by_side = panels(len(found), (2.5 + 0.75 * len(kinds)) * len(found), 1.5 + 0.24 * blocks)
    top = max(v for mean in means for row in mean for v in row if v == v)
    for plan, mean, axes in zip(found, means, side_by_side, strict=True):
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
    save(figure, file, dpi)


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


def shares(found: dict[str, plans.Plan], file: Path, dpi: int) -> None:
    figure, (axes,) = panels(1, 7, 4)
    width = 0.8 / len(found)
    for i, (name, plan) in enumerate(found.items()):
        of_plan = plan.shares()
        axes.bar([j + i * width for j in range(len(WIDTHS))], [100 * of_plan[w] for w in WIDTHS], width, label=name)
    axes.set_xticks([j + 0.4 - width / 2 for j in range(len(WIDTHS))], [f"{w:g}" for w in WIDTHS])
    axes.set(xlabel="bits", ylabel="share of the weights, %")
    axes.legend()
    save(figure, file, dpi)
