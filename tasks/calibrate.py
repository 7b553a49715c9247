"""Stage 2: input second moments, activation scales and Fisher weights of every matrix, one file a block.

Out: block-<i>.safetensors as `windquant.calibrate.calibrate` describes them.
"""

from dataclasses import dataclass

from tasks import models, progress, store
from tasks.job import Job, Record
from windquant import calibrate


@dataclass(frozen=True)
class CalibrateConfig:
    """windows: how many of the prepared calibration windows to use; None takes all."""

    windows: int | None = None

    def __post_init__(self) -> None:
        if self.windows is not None and self.windows < 1:
            raise ValueError(f"windows {self.windows} is not at least 1")


def run(config: CalibrateConfig, job: Job) -> Record:
    prepared = store.path("prepare")
    ids = store.load_tensors(prepared / "windows" / "calibration.safetensors")["ids"][: config.windows].long()
    walk = models.walk(prepared / "model", job.device)
    report = progress.bar("forward, then backward through the blocks")
    for i, statistics in calibrate.calibrate(walk, ids, job.generator(), job.scratch, report):
        store.save_tensors(job.out / f"block-{i}.safetensors", statistics)
    return Record(params={"calibration_windows": len(ids), "calibration_tokens": ids.numel()})
