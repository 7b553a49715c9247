"""The published methods behind one interface: a reference model, calibration windows and bits -> a quantized model.

A method says what becomes of a block, `Peer` walks the blocks with the streams that the engine has. One that follows
(OmniQuant, SpinQuant, TesseraQ, GPTVQ, AQLM, EfficientQAT, QuEST) is a `Method` with a loss of its own on `View.q` and
`View.target`, and, where it stores other things than codes with scales, a `Stored` of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from windquant.baselines import awq, gptq, hqq
from windquant.baselines.affine import BITS, AffineMatrix, HalfVector, round_to_nearest
from windquant.blocks import Walk, linears
from windquant.calibrate import Inputs, Report, Scratch
from windquant.errors import InputError, about
from windquant.grids import GRIDS
from windquant.quantize import PackedMatrix
from windquant.streams import Stored, Streams, View
from windquant.units import columns_of

Treatment = Callable[[View, int, int], Iterator[tuple[str, Stored]]]
"""Of a block, at some bits and columns a group: yields the path in it of every weight that changes, and what is stored."""
Rounding = Callable[[Tensor, int, int], AffineMatrix]


@dataclass(frozen=True)
class Method:
    """treat: see `Treatment`; or, of a method without data, `round`, what becomes of one matrix (rows, columns). bits: that
    it admits. target: whether it looks at what the reference's block puts out."""

    bits: tuple[int, ...] = BITS
    round: Rounding | None = None
    treat: Treatment | None = None
    target: bool = False

    def blocks(self, peer: "Peer", windows: Tensor, report: Report) -> Iterator[dict[str, Stored]]:
        """What is stored of every block, first to last. windows: calibration token ids (n, T)."""
        return peer.run(windows, report) if self.round is None else peer.rounded(self.round, report)


def _gptq(view: View, bits: int, group: int) -> Iterator[tuple[str, Stored]]:
    for name, layer in linears(view.block).items():
        with about(f"block {view.index}, {name}"):
            yield name, gptq.round_with_feedback(layer.weight, view.inputs.take(name), bits, group)


METHODS: dict[str, Method] = {
    "rtn": Method(round=round_to_nearest),
    "hqq": Method(round=hqq.half_quadratic),
    "gptq": Method(treat=_gptq),
    "awq": Method(treat=awq.quantize),
}


@dataclass(frozen=True)
class Peer(Streams[Stored]):
    """One method at some bits on a model, as `Streams` says."""

    walk: Walk
    method: Method
    bits: int
    group: int
    seed: int
    scratch: Scratch
    name: str

    def treat(self, view: View) -> Iterator[tuple[str, Stored, Tensor]]:
        assert self.method.treat is not None
        for name, stored in self.method.treat(view, self.bits, self.group):
            yield name, stored, stored.dequantize()

    def kept(self, index: int) -> dict[str, Stored]:
        return stored_of(self.walk, index, self.scratch.get(f"{self.name}-{index}"), self.bits, self.group)

    def rounded(self, rounding: Rounding, report: Report) -> Iterator[dict[str, Stored]]:
        """Every matrix by itself, without data: no streams."""
        for i in range(len(self.walk)):
            made: dict[str, Stored] = {}
            with self.walk.block(i) as block:
                for name, layer in linears(block).items():
                    full = self.walk.path(i, name)
                    with about(full):
                        made[full] = rounding(layer.weight, self.bits, self.group)
            yield made
            report(i + 1, len(self.walk))

    def _watch(self, index: int, block: nn.Module, x: Tensor, q: Tensor) -> tuple[Tensor, Inputs]:
        if self.method.target:
            return super()._watch(index, block, x, q)
        return x, self._inputs(index, block, q)  # the reference's stream stands still: nobody looks at it


def stored_of(walk: Walk, index: int, tensors: dict[str, Tensor], bits: int, group: int) -> dict[str, Stored]:
    """Inverse of `Stored.tensors` for a block: `<path>.<part>` -> what is stored. Raises InputError when a matrix is missing
    or does not fit."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, t in tensors.items():
        path, _, part = name.rpartition(".")
        parts.setdefault(path, {})[part] = t
    out: dict[str, Stored] = {}
    for m in walk.matrices(index):
        if m.name not in parts:
            raise InputError(f"{m.name} is missing among what is stored of block {index}")
        with about(m.name):
            own = parts.pop(m.name)
            if "span" in own:
                symbols = GRIDS[bits].symbol * len(columns_of(m.columns, group))
                out[m.name] = PackedMatrix.of(m.rows, m.columns, group, symbols, own)
            else:
                out[m.name] = AffineMatrix.of(m.rows, m.columns, bits, group, own)
    return out | {path: HalfVector(found["values"]) for path, found in parts.items()}
