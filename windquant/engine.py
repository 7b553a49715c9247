"""A plan applied to a model, block by block, each block calibrated on what the quantized blocks before it put out.

See `windquant.streams`; here are the treatments: rounding with error feedback, or reconstruction, which asks the block to
turn the quantized model's activations into what the reference makes of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windquant.blocks import Walk, linears
from windquant.calibrate import Inputs, Report, Scratch
from windquant.errors import InputError, about
from windquant.feedback import DAMP, Moments, round_with_feedback
from windquant.grids import symbols
from windquant.quantize import PARTS, PackedMatrix, RoundedUnits, pack_matrix
from windquant.reconstruct import Latent, ReconstructConfig, reconstruct
from windquant.salient import SALIENT_PARTS, Salient
from windquant.streams import Streams, View, compute
from windquant.units import columns_of


@dataclass(frozen=True)
class Engine(Streams[PackedMatrix]):
    """walk: the reference model. plan: a matrix's path -> the widths of its units. config: of the reconstruction; None
    rounds with error feedback alone. scratch: keeps the streams and the finished blocks, under `name`. warn: is told, in a
    sentence, what numerics had to be done otherwise than asked. protect: what of a matrix is kept in INT8, by its block, its
    path in there and its weights."""

    walk: Walk
    plan: Callable[[str], Sequence[float]]
    chunk_size: int
    config: ReconstructConfig | None
    seed: int
    scratch: Scratch
    name: str
    warn: Callable[[str], None]
    protect: Callable[[int, str, Tensor], Salient | None] = lambda block, name, w: None

    def run(self, windows: Tensor, report: Report) -> Iterator[dict[str, PackedMatrix]]:
        """Yields the packed matrices of every block, first to last. windows: calibration token ids (n, T).

        Raises InputError as `Streams.run` does, and when the plan has not one width a unit.
        """
        for m in (m for i in range(len(self.walk)) for m in self.walk.matrices(i)):
            units, planned = len(columns_of(m.columns, self.chunk_size)), len(self.plan(m.name))
            if planned != units:
                raise InputError(f"{m.name}: the plan has {planned} widths for its {units} units")
        return super().run(windows, report)

    def _watch(self, index: int, block: nn.Module, x: Tensor, q: Tensor) -> tuple[Tensor, Inputs]:
        if self.config is None:  # error feedback does not ask what the reference's block makes of its own
            return x, self._inputs(index, block, q)
        return super()._watch(index, block, x, q)

    def kept(self, index: int) -> dict[str, PackedMatrix]:
        """The packed matrices of a finished block."""
        kept, out = self.scratch.get(f"{self.name}-{index}"), {}
        for m in self.walk.matrices(index):
            names = {part: f"{m.name}.{part}" for part in (*PARTS, *SALIENT_PARTS)}
            parts = {part: kept[name] for part, name in names.items() if name in kept}
            out[m.name] = PackedMatrix.of(m.rows, m.columns, self.chunk_size, symbols(self.plan(m.name)), parts)
        return out

    def treat(self, view: View) -> Iterator[tuple[str, PackedMatrix, Tensor]]:
        salient = {name: self.protect(view.index, name, layer.weight) for name, layer in linears(view.block).items()}
        treatment = self._feedback if self.config is None else self._reconstruct
        for name, units in treatment(view, salient):
            packed, dense = pack_matrix(units, self.chunk_size, salient[name])
            if not torch.equal(packed.dequantize(), dense):
                raise AssertionError(
                    f"{self.walk.path(view.index, name)}: unpacking does not give the weights that were packed"
                )
            yield name, packed, dense

    def _feedback(self, view: View, salient: dict[str, Salient | None]) -> Iterator[tuple[str, list[RoundedUnits]]]:
        for name, layer in linears(view.block).items():
            full = self.walk.path(view.index, name)
            with about(full):
                moments = Moments.of(view.inputs.take(name), self.chunk_size)
                units = round_with_feedback(layer.weight, moments, self.plan(full), salient[name])
            found = moments.factor
            if found.U is None:
                self.warn(f"{full}: its input moments cannot be factored; rounded to nearest, without error feedback")
            elif found.damp > DAMP[0]:
                self.warn(f"{full}: its input moments took a damping of {found.damp:g} to factor, not {DAMP[0]:g}")
            yield name, units

    def _reconstruct(self, view: View, salient: dict[str, Salient | None]) -> Iterator[tuple[str, list[RoundedUnits]]]:
        assert self.config is not None
        latents = {}
        for name, layer in linears(view.block).items():
            full = self.walk.path(view.index, name)
            with about(full):
                bits = self.plan(full)
                latents[name] = Latent(layer.weight, view.inputs.take(name), bits, self.chunk_size, salient[name])
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # the latent has it
        batches = self._batches(view.q, view.target, self.config.batch, view.generator)
        with compute(self.walk.device):
            reconstruct(view.block, latents, batches, view.run, self.config)
        for name in list(latents):
            with about(self.walk.path(view.index, name)):
                rounded = latents.pop(name).rounded()
            yield name, rounded  # packed, and taken by the block again, before the next one is
