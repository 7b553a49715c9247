"""A dense model that stands for one plan after another, and how far from the reference it is under each.

How a plan's weights are made is a subclass's: composed of units that were made beforehand (`supernet.Composed`), or rounded
matrix by matrix with error feedback (`Fed`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windquant.blocks import decoder_blocks, inside
from windquant.errors import InputError, about
from windquant.feedback import Moments, round_with_feedback
from windquant.quantize import pack_matrix
from windquant.salient import Salient
from windquant.streams import FORWARD_WINDOWS, compute
from windquant.units import Unit


@dataclass
class Candidates:
    """model: the reference, whose matrices are replaced; weights are rounded to its dtype once. body: all units, matrix
    after matrix. now: the widths that the model has; None: the reference's."""

    model: Any
    body: list[Unit]
    now: list[float | None] = field(init=False)

    def __post_init__(self) -> None:
        self.replaced()
        self.prefix = decoder_blocks(self.model)[0]
        self.chunks = {u.matrix.name: u.columns for u in self.body if u.first_column == 0}
        self.layers = {name: self.model.get_submodule(name) for name in self.chunks}
        self.original = {name: layer.weight.detach().clone() for name, layer in self.layers.items()}

    def replaced(self) -> None:
        """To be told when somebody else sets the model's weights: it has no plan from then on."""
        self.now = [None] * len(self.body)

    @torch.no_grad()
    def set(self, bits: Sequence[float]) -> None:
        """Give the model a plan, a width for every unit. Raises InputError when there are more or fewer."""
        if len(bits) != len(self.body):
            raise InputError(f"a plan of {len(bits)} widths for {len(self.body)} units")
        changed = [i for i, b in enumerate(bits) if b != self.now[i]]
        for i in changed:  # should writing fail half way
            self.now[i] = None
        self.write(bits, changed)
        self.now = list(bits)

    def write(self, bits: Sequence[float], changed: list[int]) -> None:
        """Set the weights of units that have another width than before, or of the matrices that they belong to."""
        raise NotImplementedError

    @torch.no_grad()
    def log_probabilities(self, windows: Tensor) -> Iterator[Tensor]:
        """Of every next token of windows (n, T), under the plan set: (some windows, T - 1, vocabulary), float32."""
        device = next(self.model.parameters()).device
        for part in windows.split(FORWARD_WINDOWS):
            with compute(device):
                logits = self.model(input_ids=part.to(device), use_cache=False).logits[:, :-1]
            yield logits.float().log_softmax(-1)

    @torch.no_grad()
    def divergence(self, windows: Tensor, reference: Sequence[Tensor]) -> float:
        """Mean KL(reference || this model as it is), nats a token. reference: what `log_probabilities` of the windows gave,
        before any plan was set."""
        total = 0.0
        for logp, kept in zip(self.log_probabilities(windows), reference, strict=True):
            expected = kept.to(logp)
            total += float(F.kl_div(logp, expected, reduction="sum", log_target=True))
        return total / (windows.shape[0] * (windows.shape[1] - 1))


@dataclass
class Fed(Candidates):
    """Matrices rounded with error feedback, under the moments that the reference's blocks put out. The engine takes those of
    the quantized blocks before; here a matrix depends on its own units alone, and one whose widths stay is not rounded
    again, nor is any text run through the blocks. It starts from weights of the model's own dtype. moments, protect: of a
    block's index and a path in the block, H; and what is kept in INT8 of these weights."""

    moments: Callable[[int, str], Tensor]
    protect: Callable[[int, str, Tensor], Salient | None]
    salient: dict[str, Salient | None] = field(init=False, default_factory=dict)

    def write(self, bits: Sequence[float], changed: list[int]) -> None:
        todo, H, moments = {self.body[i].matrix.name for i in changed}, None, None
        for matrix, units in groupby(range(len(self.body)), lambda i: self.body[i].matrix):
            widths = [bits[i] for i in units]
            if matrix.name not in todo:
                continue
            layer, chunk = self.layers[matrix.name], self.chunks[matrix.name]
            w, (block, inner) = self.original[matrix.name].float(), inside(self.prefix, matrix.name)
            with about(matrix.name):
                if matrix.name not in self.salient:  # the same under every plan
                    self.salient[matrix.name] = self.protect(block, inner, w)
                salient, own = self.salient[matrix.name], self.moments(block, inner)
                if moments is None or own is not H:  # q, k and v, gate and up have the same
                    H, moments = own, Moments.of(own.to(w.device), chunk)
                rounded = round_with_feedback(w, moments, widths, salient)
            layer.weight.copy_(pack_matrix(rounded, chunk, salient)[1])
