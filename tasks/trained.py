"""Published methods that train the model itself, on our loop: one width everywhere, no WinQ.

ParetoQ (arXiv 2502.02631) on the next token of the training text; LLM-QAT (arXiv 2305.17888) on what the reference says to
text that it made up itself. Both with our grids (ParetoQ's own) and our eight-bit scales, one a row of a group of columns;
both start from the reference's weights rounded to nearest.
"""

from collections.abc import Iterator

import torch

from tasks import generate, models, progress, store
from tasks.job import Job
from tasks.shared import Shared
from tasks.student import FinetuneConfig, Student, as_teacher
from windquant import blocks, qat
from windquant.errors import about
from windquant.quantize import pack_matrix
from windquant.reconstruct import Latent
from windquant.streams import Stored
from windquant.units import columns_of

METHODS = {"paretoq": 0.0, "llm-qat": 1.0}
"""Weight of the divergence from the reference in the loss."""
BITS = (1, 2, 3, 4)
EDGE = 0.49
"""Weights start where the reference has them, up to a hundredth of a step from the next cell."""


def settings(method: str, steps: int) -> FinetuneConfig:
    return FinetuneConfig(steps=steps, train="matrices", codes="learned",
                          distill=METHODS[method], alpha=0.0, sigma=0.0, eval_every=0)  # fmt: skip


def quantize(method: str, bits: int, group: int, steps: int, job: Job) -> Iterator[dict[str, Stored]]:
    """Every block's matrices, first to last. group: columns with a scale."""
    from tasks.training import Text, train  # late: Trainer drags much in

    config, folder = settings(method, steps), store.path("prepare")
    model = models.reference(folder / "model", job.device)
    found = blocks.matrices(model)
    for m in found:
        layer = model.get_submodule(m.name)
        w, widths = layer.weight, columns_of(m.columns, group)
        with about(m.name):
            # Latent leaves the scales room to grow in, as reconstruction's plans have it.
            latent = Latent(w, torch.eye(m.columns, device=w.device), [bits] * len(widths), group)
            packed, _ = pack_matrix(latent.rounded(), group)
        model.set_submodule(m.name, qat.QuantizedLinear(packed, layer.bias, w, EDGE))
    ids = store.load_tensors(folder / "windows" / "train.safetensors")["ids"].long()
    reference = None
    if config.distill:
        reference = as_teacher(models.reference(folder / "model", job.device), job.device)
        wanted, report = min(len(ids), steps * config.batch), progress.bar("generating text")
        shared = Shared(job.device, [generate])
        with shared.alone("text"):
            ids = generate.windows(reference, wanted, ids.shape[1], job.common.seed, shared, report)
    student = Student(model, reference, config)
    report = progress.bar(f"training {job.variant}")
    train(student, Text(ids, ids[:1]), config, job.common.seed, job.scratch.folder / "training", job.device, report)
    for block in range(max(m.block for m in found) + 1):
        yield {m.name: model.get_submodule(m.name).packed() for m in found if m.block == block}
