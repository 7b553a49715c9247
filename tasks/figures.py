"""What all pictures have in common. matplotlib is imported when one is made."""

from pathlib import Path
from typing import Any


def panels(count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure, in inches, and its axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def save(figure: Any, file: Path, dpi: int = 120) -> None:
    """The same picture is the same file: no version of a program is written into it."""
    figure.savefig(file, dpi=dpi, metadata={"Software": None})
