"""The text of `compare`: one table, the best of every range of bits in bold, and what stands beside it."""

import math
from collections.abc import Sequence
from typing import Any

from tasks import published

COLUMNS = ("method", "effective bits", "model MB", "perplexity", "KL", "accuracy", "hours", "peak GiB")
FORMATS = {"effective bits": ".4f", "model MB": ".1f", "perplexity": ".2f", "KL": ".3f", "accuracy": ".3f", "hours": ".2f",
           "peak GiB": ".1f"}  # fmt: skip
BEST = {"perplexity": min, "KL": min, "accuracy": max}


def bits_range(effective_bits: float) -> int:
    """Rows compete with those of the same range, from a quarter below a whole number of bits to three quarters above:
    scales and zero points take up to half a bit."""
    return math.floor(effective_bits + 0.25)


def comparison(rows: Sequence[dict[str, Any]]) -> str:
    """A table of rows with COLUMNS, narrow ones first."""
    from tabulate import tabulate

    ordered = sorted(rows, key=lambda r: (r["method"] != "reference", bits_range(r["effective bits"]), r["perplexity"]))
    cells = [[_cell(r, c, rows) for c in COLUMNS] for r in ordered]
    align = ("left", *("right" for _ in COLUMNS[1:]))
    return tabulate(cells, COLUMNS, tablefmt="github", disable_numparse=True, colalign=align)


def _cell(row: dict[str, Any], column: str, rows: Sequence[dict[str, Any]]) -> str:
    if column == "method":
        return row["method"]
    text = _number(row[column], FORMATS[column])
    if column not in BEST or row["method"] == "reference":
        return text
    own = bits_range(row["effective bits"])
    rivals = [r for r in rows if r["method"] != "reference" and bits_range(r["effective bits"]) == own]
    best = BEST[column](r[column] for r in rivals)
    return f"**{text}**" if row[column] == best and len(rivals) > 1 else text


def _number(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if abs(value) >= 1e5 else f"{value:{form}}"


def markdown(
    rows: Sequence[dict[str, Any]], missing: dict[str, str], facts: dict[str, Any], completions: dict[str, list[str]]
) -> str:
    """missing: what made no row, and why. completions: by model, and under `prompt`."""
    lines = [
        comparison(rows),
        f"Effective bits count every stored byte of the quantized matrices; the reference is kept at 16 bits. Perplexity a "
        f"token on {facts['perplexity_windows']} windows of {facts['perplexity_window']} tokens, stride "
        f"{facts['perplexity_stride']}. Accuracy: mean over {facts['tasks']}. KL: to the reference, nats a token. Hours and "
        f"peak memory: to make the checkpoint. Bold: the best of a range of bits. <method>-<bits>: published methods, made "
        f"and measured here, each on its share of the CPU (baselines.at_once).",
    ]
    if missing:
        lines.append("\n".join(["Not in the table:", "", *(f"- {name}: {why}" for name, why in missing.items())]))
    lines += ["## Published, not measured here", _published(), "## Greedy completions"]
    names = [n for n in completions if n != "prompt"]
    for i, prompt in enumerate(completions["prompt"]):
        lines.append(f"> {prompt}")
        lines += [f"**{n}**: {' '.join(completions[n][i].split())}" for n in names]
    return "\n\n".join(lines) + "\n"


def _published() -> str:
    from tabulate import tabulate

    columns = (
        "model",
        "method",
        "paper's bits",
        "WikiText-2 perplexity",
        "accuracy",
        "GPU hours",
        "GB",
        "source",
        "note",
    )
    cells = [
        [r.model, r.method, *(_number(v, f) for v, f in ((r.bits, "g"), (r.perplexity, ".2f"), (r.accuracy, ".4f"),
                                                         (r.hours, "g"), (r.gigabytes, "g"))), r.source, r.note]
        for r in published.ROWS
    ]  # fmt: skip
    return tabulate(cells, columns, tablefmt="github", disable_numparse=True)
