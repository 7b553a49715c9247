"""The stages, their order, and the pieces that run by themselves."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

STAGES = (
    "prepare",
    "calibrate",
    "sensitivity",
    "supernet",
    "allocate",
    "quantize",
    "finetune",
    "diagnose",
    "benchmark",
    "baselines",
    "compare",
)
MATRIX = "baselines"
"""The stage that DVC runs as a matrix: every variant by itself."""
USER_ERROR, NO_ROOM = 2, 3
"""Exit codes of a stage that ended in a sentence, see `tasks.__main__`."""


@dataclass(frozen=True)
class Piece:
    """A stage, or one variant (`rtn-2`) of the matrix stage."""

    stage: str
    variant: str = ""

    @property
    def name(self) -> str:
        """Of its task run in Prefect, its run in MLflow, and its lines in a log."""
        return f"{self.stage}-{self.variant}" if self.variant else self.stage

    @property
    def key(self) -> str:
        """Of its folders, see `tasks.store`."""
        return f"{self.stage}/{self.variant}" if self.variant else self.stage

    @property
    def log_file(self) -> Path:
        return Path(".state") / self.key / "log.txt"

    @property
    def exit_code(self) -> Path:
        """The file with that of its last run."""
        return self.log_file.with_name("exit")

    @property
    def target(self) -> str:
        """What DVC calls it."""
        return f"{self.stage}@{self.variant}" if self.variant else self.stage


def pieces(variants: Iterable[str]) -> list[Piece]:
    """All that a pipeline runs, in order. variants: of the matrix stage."""
    return [Piece(stage, v) for stage in STAGES for v in (variants if stage == MATRIX else ("",))]
