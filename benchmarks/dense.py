"""The reference in memory, its matrices replaced by others in turn, and scored on held-out articles."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tasks import models, plans, progress, store
from tasks.statistics import Protector, Statistics
from windquant import blocks
from windquant.evaluate import Scores, score
from windquant.grids import GRIDS, decode, encode, start_scale
from windquant.quantize import quantize_matrix
from windquant.sensitivity import split


class Dense:
    """windows: how many test windows to score, 0 for all."""

    def __init__(self, windows: int) -> None:
        prepared = store.path("prepare")
        self.model = models.reference(prepared / "model", torch.device("cpu"))
        ids = store.load_tensors(prepared / "windows" / "test.safetensors")["ids"]
        self.windows = ids[: windows or None].long()
        self.stride = store.load_json(prepared / "manifest.json")["eval_stride"]
        self.prefix = blocks.decoder_blocks(self.model)[0]
        self.original = {m.name: self._linear(m.name).weight.detach().clone() for m in blocks.matrices(self.model)}

    def _linear(self, name: str) -> nn.Linear:
        found = self.model.get_submodule(name)
        assert isinstance(found, nn.Linear)
        return found

    def set(self, name: str, weight: Tensor) -> None:
        self._linear(name).weight.data.copy_(weight)

    def inside(self, name: str) -> tuple[int, str]:
        """A matrix's block, and its path in there."""
        return blocks.inside(self.prefix, name)

    def score(self, label: str) -> Scores:
        return score(self.model, self.windows, self.stride, report=progress.bar(f"perplexity of {label}"))


def on_starting_scales(w: Tensor, bits: Sequence[float], chunk: int) -> Tensor:
    """A matrix rounded to nearest on the papers' starting scales, which are not fitted to anything."""
    parts = []
    for unit, b in zip((u for stack in split(w, chunk) for u in stack), bits, strict=True):
        s = start_scale(unit, GRIDS[b])
        parts.append(decode(encode(unit, s, GRIDS[b]), s, GRIDS[b]))
    return torch.cat(parts, 1)


def round_to_nearest(dense: Dense, plan: plans.Plan) -> None:
    """Every matrix of the reference, with its moments as `calibrate` took them."""
    statistics, protector, report = Statistics(), Protector(plan.protection), progress.bar("rounding")
    for i, (name, w) in enumerate(dense.original.items()):
        block, inner = dense.inside(name)
        chunk, salient = plan.header["chunk_size"], protector(block, inner, w)
        dense.set(name, quantize_matrix(w, statistics.moment(block, inner), plan.of(name), chunk, salient)[1])
        report(i + 1, len(dense.original))
