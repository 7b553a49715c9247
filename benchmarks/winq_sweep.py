"""WinQ over alpha, sigma and the number of pulls, one of them changed at a time; otherwise as in `winq`."""

from dataclasses import replace
from typing import Any

from benchmarks.winq import PLAIN, WINQ, Bench, notes, rows_of

VARIANTS = (
    {"plain": PLAIN, "winq": WINQ}
    | {f"alpha {alpha:g}": replace(WINQ, alpha=alpha) for alpha in (0.1, 0.8)}
    | {f"sigma {sigma:g}": replace(WINQ, sigma=sigma) for sigma in (4e-3, 1.6e-2)}
    | {f"{pulls} pulls": replace(WINQ, pulls=pulls) for pulls in (2, 16)}
)


def run(seeds: int) -> tuple[list[dict[str, Any]], list[str]]:
    bench = Bench()
    rows = rows_of(bench, VARIANTS, seeds)
    return rows, notes(rows, VARIANTS, bench.reference)
