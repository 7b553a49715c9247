"""Stage 2: input second moments, activation scales and Fisher weights of every matrix, one file a block.

Out: block-<i>.safetensors as `windquant.calibrate.calibrate` describes them.
"""

import logging
from dataclasses import dataclass

from tasks import models, progress, store
from tasks.job import Job, Record
from windquant import blocks, calibrate, experts

log = logging.getLogger("windquant")


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
    tokens: dict[str, int] = {}
    for i, statistics in calibrate.calibrate(walk, ids, job.generator(), job.scratch, report):
        store.save_tensors(job.out / f"block-{i}.safetensors", statistics)
        counts = {k.removeprefix("tokens."): int(t) for k, t in statistics.items() if k.startswith("tokens.")}
        tokens |= {walk.path(i, k): n for k, n in counts.items()}
    params = {"calibration_windows": len(ids), "calibration_tokens": ids.numel()}
    return Record(params=params, metrics=_experts(walk, tokens))


def _experts(walk: blocks.Walk, tokens: dict[str, int]) -> dict[str, float]:
    """How many experts there are and how many the calibration text never called; nothing for a model without experts.

    tokens: of every matrix, by its name.
    """
    groups = [g for g in experts.groups(walk.model) if g[0].endswith(experts.INNER)]
    every = [name.rpartition(".")[0] for group in groups for name in group]
    idle = [e for e in every if not tokens[f"{e}.{experts.INNER}"]]
    if not every:
        return {}
    names = f" ({', '.join(idle[:8])}{', ...' if len(idle) > 8 else ''})" if idle else ""
    log.info("experts without calibration tokens: %d of %d%s", len(idle), len(every), names)
    return {"experts": len(every), "experts_without_tokens": len(idle)}
