"""Two streams of activations through a model whose blocks are quantized one after another.

The reference's stream, and that of the model as quantized so far: a block is calibrated on the second, and may be asked to
make of it what the reference makes of the first. One block is in memory at a time; the streams lie in the scratch store,
which is also what an interrupted run resumes from, bit for bit: every block draws from a generator of its own. What is done
with a block is a subclass's: the engine's treatments, or a baseline's.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from windquant import experts, memory
from windquant.blocks import Walk
from windquant.calibrate import Inputs, Report, Scratch
from windquant.errors import InputError

FORWARD_WINDOWS = 4
"""Windows that run through a block together."""


class Stored(Protocol):
    """A weight as it is stored: its parts, bit for bit those of a file, and the weight that they make, float32."""

    def tensors(self) -> dict[str, Tensor]: ...
    def dequantize(self) -> Tensor: ...


S = TypeVar("S", bound=Stored)


@dataclass(frozen=True)
class View:
    """What a treatment is given of a block. block: with the reference's weights. q: the quantized model's activations
    (n, T, hidden), on the CPU; inputs: what they are like in front of every matrix. target: what the reference makes of its
    own. run: such activations, on the device, through the block as it is. generator: the block's own."""

    index: int
    block: nn.Module
    q: Tensor
    inputs: Inputs
    target: Tensor
    run: Callable[[Tensor], Tensor]
    generator: torch.Generator


class Streams(Generic[S]):
    """walk: the reference model. scratch: keeps the streams and the finished blocks, under `name`."""

    walk: Walk
    seed: int
    scratch: Scratch
    name: str

    def treat(self, view: View) -> Iterator[tuple[str, S, Tensor]]:
        """Yields the path in the block, what is stored and the weight that it makes, for every weight that changes."""
        raise NotImplementedError

    def kept(self, index: int) -> dict[str, S]:
        """What is stored of a finished block, by its path in the model."""
        raise NotImplementedError

    def run(self, windows: Tensor, report: Report) -> Iterator[dict[str, S]]:
        """Yields what is stored of every block, first to last. windows: calibration token ids (n, T).

        Raises InputError on NaN or Inf in weights or activations, with the block's or the matrix's name, and without
        windows.
        """
        if not windows.numel():
            raise InputError(f"calibration windows of the shape {tuple(windows.shape)} hold no text")
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
        made, x, q = self._block(index, x, q)
        # Into the slot of the block before last: until the finished block is there, too, this one starts again.
        self.scratch.put(f"{self.name}-streams-{index % 2}", {"reference": x, "quantized": q})
        self.keep(index, made)
        memory.trim()

    def _streams(self, block: int) -> tuple[Tensor, Tensor]:
        kept = self.scratch.get(f"{self.name}-streams-{block % 2}")
        return kept["reference"], kept["quantized"]

    def has(self, index: int) -> bool:
        return self.scratch.has(f"{self.name}-{index}")

    def keep(self, index: int, made: dict[str, S]) -> None:
        self.scratch.put(f"{self.name}-{index}", named(made))

    def _block(self, index: int, x: Tensor, q: Tensor) -> tuple[dict[str, S], Tensor, Tensor]:
        """What is stored of the block, and both streams behind it."""
        made: dict[str, S] = {}
        with self.walk.block(index) as block:
            target, inputs = self._watch(index, block, x, q)
            view = View(index, block, q, inputs, target, lambda h: self.walk.run(index, block, h), self._generator(index))
            for name, stored, dense in self.treat(view):
                made[self.walk.path(index, name)] = stored
                block.get_submodule(name).weight = nn.Parameter(dense, requires_grad=False)
            return made, target, self._forward(index, block, q, "the quantized model's")

    def _watch(self, index: int, block: nn.Module, x: Tensor, q: Tensor) -> tuple[Tensor, Inputs]:
        """What the reference's block makes of x, and what the quantized model's activations q are like in it."""
        target = self._forward(index, block, x, "the reference's")
        return target, self._inputs(index, block, q)

    def _inputs(self, index: int, block: nn.Module, q: Tensor) -> Inputs:
        inputs = Inputs(block=index)
        with inputs.watch(block):
            self._forward(index, block, q, "the quantized model's")
        inputs.finish_(experts.groups(block))
        return inputs

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

    def _batches(self, q: Tensor, target: Tensor, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows without replacement, over and over."""
        while True:
            for picked in torch.randperm(len(q), generator=generator).split(size):
                yield q[picked].to(self.walk.device), target[picked].to(self.walk.device)


def named(made: Mapping[str, Stored]) -> dict[str, Tensor]:
    """`<path>.<part>` -> tensor, of what is stored by path."""
    return {f"{path}.{part}": t for path, stored in made.items() for part, t in stored.tensors().items()}


def compute(device: torch.device) -> torch.autocast:
    """Matrix products in bfloat16 where the machine has them: several times faster, and small beside what rounding does."""
    return torch.autocast(device.type, torch.bfloat16, enabled=compute_fast(device))


def compute_fast(device: torch.device) -> bool:
    """Whether the machine has products in bfloat16."""
    return device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
