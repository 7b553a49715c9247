"""A plan applied to a model, block by block, each block calibrated on what the quantized blocks before it put out.

Two streams of activations run through the blocks: the reference's, and that of the model as quantized so far. A block's
input moments are taken from the second; reconstruction asks the block to turn the second into what the reference makes of
the first. One block is in memory at a time; the streams lie in the scratch store, which is also what an interrupted run
resumes from, bit for bit: every block draws its batches from a generator of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windquant import experts, memory
from windquant.blocks import Walk, linears
from windquant.calibrate import Inputs, Report, Scratch
from windquant.errors import InputError, about
from windquant.feedback import DAMP, round_with_feedback
from windquant.grids import symbols
from windquant.quantize import PARTS, PackedMatrix, RoundedUnits, pack_matrix
from windquant.reconstruct import Latent, ReconstructConfig, reconstruct
from windquant.salient import SALIENT_PARTS, Salient
from windquant.units import columns_of

FORWARD_WINDOWS = 4
"""Windows that run through a block together."""


@dataclass(frozen=True)
class Engine:
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

        Raises InputError on NaN or Inf in weights or activations, with the block's or the matrix's name, without windows,
        and when the plan has not one width a unit.
        """
        if not windows.numel():
            raise InputError(f"calibration windows of the shape {tuple(windows.shape)} hold no text")
        for m in (m for i in range(len(self.walk)) for m in self.walk.matrices(i)):
            units, planned = len(columns_of(m.columns, self.chunk_size)), len(self.plan(m.name))
            if planned != units:
                raise InputError(f"{m.name}: the plan has {planned} widths for its {units} units")
        streams = None
        for i in range(len(self.walk)):
            if not self.has(i):
                if streams is None:  # also after an interruption: embedding tells the walk what its blocks are called with
                    streams = (self.walk.embed(windows),) * 2
                if i > 0:
                    streams = self._streams(i - 1)
                self._finish(i, *streams)
            yield self.kept(i)
            report(i + 1, len(self.walk))

    def _finish(self, index: int, x: Tensor, q: Tensor) -> None:
        packed, x, q = self._block(index, x, q)
        # Into the slot of the block before last: until the packed block is there, too, this one starts again.
        self.scratch.put(f"{self.name}-streams-{index % 2}", {"reference": x, "quantized": q})
        self.keep(index, packed)
        memory.trim()

    def _streams(self, block: int) -> tuple[Tensor, Tensor]:
        kept = self.scratch.get(f"{self.name}-streams-{block % 2}")
        return kept["reference"], kept["quantized"]

    def has(self, index: int) -> bool:
        return self.scratch.has(f"{self.name}-{index}")

    def keep(self, index: int, packed: dict[str, PackedMatrix]) -> None:
        tensors = {f"{m}.{part}": t for m, p in packed.items() for part, t in p.tensors().items()}
        self.scratch.put(f"{self.name}-{index}", tensors)

    def kept(self, index: int) -> dict[str, PackedMatrix]:
        """The packed matrices of a finished block."""
        kept, out = self.scratch.get(f"{self.name}-{index}"), {}
        for m in self.walk.matrices(index):
            names = {part: f"{m.name}.{part}" for part in (*PARTS, *SALIENT_PARTS)}
            parts = {part: kept[name] for part, name in names.items() if name in kept}
            out[m.name] = PackedMatrix.of(m.rows, m.columns, self.chunk_size, symbols(self.plan(m.name)), parts)
        return out

    def _block(self, index: int, x: Tensor, q: Tensor) -> tuple[dict[str, PackedMatrix], Tensor, Tensor]:
        """The block's matrices, and both streams behind it."""
        packed = {}
        with self.walk.block(index) as block:
            target, inputs = self._watch(index, block, x, q)
            salient = {name: self.protect(index, name, layer.weight) for name, layer in linears(block).items()}
            if self.config is None:
                rounded = self._feedback(index, block, inputs, salient)
            else:
                rounded = self._reconstruct(index, block, inputs, q, target, salient)
            for name, units in rounded:
                full = self.walk.path(index, name)
                packed[full], dense = pack_matrix(units, self.chunk_size, salient[name])
                linears(block)[name].weight = nn.Parameter(dense, requires_grad=False)
                if not torch.equal(packed[full].dequantize(), dense):
                    raise AssertionError(f"{full}: unpacking does not give the weights that were packed")
            return packed, target, self._forward(index, block, q, "the quantized model's")

    def _watch(self, index: int, block: nn.Module, x: Tensor, q: Tensor) -> tuple[Tensor, Inputs]:
        """What the reference's block makes of x, and what the quantized model's activations q are like in it."""
        inputs = Inputs(block=index)
        target = self._forward(index, block, x, "the reference's")
        with inputs.watch(block):
            self._forward(index, block, q, "the quantized model's")
        inputs.finish_(experts.groups(block))
        return target, inputs

    def _generator(self, index: int) -> torch.Generator:
        """A block's own, so that an interrupted run goes on alike."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + index)

    def _forward(self, index: int, block: nn.Module, hidden: Tensor, whose: str) -> Tensor:
        """All windows (n, T, hidden) through a block, on the CPU."""
        out = torch.empty_like(hidden)
        with torch.no_grad(), compute(self.walk.device):
            for part, made in zip(hidden.split(FORWARD_WINDOWS), out.split(FORWARD_WINDOWS), strict=True):
                made.copy_(self.walk.run(index, block, part.to(self.walk.device)))
                if not bool(torch.isfinite(made).all()):
                    raise InputError(f"block {index} puts out NaN or Inf on {whose} activations of the calibration text")
        return out

    def _feedback(
        self, index: int, block: nn.Module, inputs: Inputs, salient: dict[str, Salient | None]
    ) -> Iterator[tuple[str, list[RoundedUnits]]]:
        for name, layer in linears(block).items():
            full = self.walk.path(index, name)
            H, bits = inputs.take(name), self.plan(full)
            with about(full):
                units, found = round_with_feedback(layer.weight, H, bits, self.chunk_size, salient[name])
            if found.U is None:
                self.warn(f"{full}: its input moments cannot be factored; rounded to nearest, without error feedback")
            elif found.damp > DAMP[0]:
                self.warn(f"{full}: its input moments took a damping of {found.damp:g} to factor, not {DAMP[0]:g}")
            yield name, units

    def _reconstruct(
        self,
        index: int,
        block: nn.Module,
        inputs: Inputs,
        q: Tensor,
        target: Tensor,
        salient: dict[str, Salient | None],
    ) -> Iterator[tuple[str, list[RoundedUnits]]]:
        assert self.config is not None
        latents = {}
        for name, layer in linears(block).items():
            full = self.walk.path(index, name)
            with about(full):
                bits = self.plan(full)
                latents[name] = Latent(layer.weight, inputs.take(name), bits, self.chunk_size, salient[name])
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # the latent has it
        batches = self._batches(q, target, self.config.batch, self._generator(index))
        with compute(self.walk.device):
            reconstruct(block, latents, batches, lambda x: self.walk.run(index, block, x), self.config)
        for name in list(latents):
            with about(self.walk.path(index, name)):
                rounded = latents.pop(name).rounded()
            yield name, rounded  # packed, and taken by the block again, before the next one is

    def _batches(self, q: Tensor, target: Tensor, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows without replacement, over and over."""
        while True:
            for picked in torch.randperm(len(q), generator=generator).split(size):
                yield q[picked].to(self.walk.device), target[picked].to(self.walk.device)


def compute(device: torch.device) -> torch.autocast:
    """Matrix products in bfloat16 where the machine has them: several times faster, and small beside what rounding does."""
    return torch.autocast(device.type, torch.bfloat16, enabled=compute_fast(device))


def compute_fast(device: torch.device) -> bool:
    """Whether the machine has products in bfloat16."""
    return device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
