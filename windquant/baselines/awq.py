"""AWQ (arXiv 2306.00978): columns that see large inputs are scaled up before they are rounded, and so err less.

The columns of matrices fed by one input are scaled by s = a^alpha, a the mean |x| of a column's input, alpha searched over a
grid for the least error of their outputs on the calibration text, e H e^T summed over rows; then round to nearest. Inputs
must be divided by s: a norm in front, or the rows of the matrix in front, take that in where it is exact, else s is stored.
What is exact is tried out, so no architecture is named. AWQ's second search, for clipped ranges, is not here.

Notation: w (rows, columns); H (columns, columns) input second moments; s (columns,).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from windquant.baselines.affine import AffineMatrix, HalfVector, round_to_nearest
from windquant.blocks import linears
from windquant.scales import quadratic
from windquant.streams import View

ALPHAS = tuple(i / 20 for i in range(20))
"""AWQ's grid; 0 is no scaling."""
EXACT = 1e-3
"""Of a block's output, how far off a moved scale may take it: single precision gives 1e-6, a wrong place about 1."""


def column_scales(a: Tensor, alpha: float) -> Tensor:
    """s of magnitudes a (columns,), around 1 and of float16, as it may be stored."""
    s = a.clamp_min(1e-4).pow(alpha)
    return (s / (s.max() * s.min()).sqrt()).half().float()


def scaled(w: Tensor, s: Tensor, bits: int, group: int) -> Tensor:
    """What is computed with when w s is rounded to nearest and inputs are divided by s."""
    return round_to_nearest(w * s, bits, group).dequantize() / s


def output_error(w: Tensor, H: Tensor, s: Tensor, bits: int, group: int) -> float:
    return float(quadratic((w - scaled(w, s, bits, group))[None], H[None]).sum())


def search(ws: Sequence[Tensor], H: Tensor, a: Tensor, bits: int, group: int) -> Tensor:
    """The best s for matrices (rows, columns) that are fed by one input."""
    found = [(sum(output_error(w, H, s, bits, group) for w in ws), s) for s in (column_scales(a, t) for t in ALPHAS)]
    return min(found, key=lambda pair: pair[0])[1]


def quantize(view: View, bits: int, group: int) -> Iterator[tuple[str, AffineMatrix | HalfVector]]:
    """The matrices of a block, and the norms that took scales. Raises InputError as `round_to_nearest` does."""
    layers, inputs = linears(view.block), view.inputs
    fed: dict[str, list[str]] = {}
    for name, owner in inputs.source.items():
        fed.setdefault(owner, []).append(name)
    found = {o: search([layers[n].weight for n in names], inputs.moment[o], inputs.scale[o], bits, group)
             for o, names in fed.items()}  # fmt: skip
    fold = Fold(view)
    places = {owner: fold.place([layers[n] for n in names]) for owner, names in fed.items()}
    kept: dict[str, Tensor] = {}
    for owner, names in fed.items():
        scale_(places[owner], [layers[n] for n in names], found[owner])
        kept |= {} if places[owner] else dict.fromkeys(names, found[owner].half())
    for place in places.values():
        if place is not None and not isinstance(place, nn.Linear):
            yield fold.names[place], HalfVector(_weight(place).half())
    for name, layer in layers.items():
        stored = round_to_nearest(layer.weight, bits, group)
        yield name, AffineMatrix(bits, group, stored.codes, stored.scale, stored.zero, kept.get(name))


@torch.no_grad()
def scale_(place: nn.Module | None, layers: Sequence[nn.Linear], s: Tensor) -> None:
    """Scale the columns of layers by s, and divide the weight in front of them by it."""
    for layer in layers:
        layer.weight *= s
    if place is not None:
        weight = _weight(place)
        weight /= s if weight.ndim == 1 else s[:, None]


class Fold:
    """Finds out where a block's inputs can be divided: moves a scale there, and looks at the block's output."""

    def __init__(self, view: View) -> None:
        self.names = {m: n for n, m in view.block.named_modules()}
        self._run, self._x = view.run, view.q[:1].to(next(view.block.parameters()).device)
        self._order: list[nn.Module] = []
        handles = [m.register_forward_hook(lambda m, *_: self._order.append(m)) for m in self.names if _scalable(m)]
        try:
            self._expected = self._output()
        finally:
            for h in handles:
                h.remove()

    @torch.no_grad()
    def _output(self) -> Tensor:
        return self._run(self._x).float()

    def place(self, layers: Sequence[nn.Linear]) -> nn.Module | None:
        """The last module before some layers, fed by one input, whose weight can take their scale."""
        first = min((self._order.index(m) for m in layers if m in self._order), default=0)
        columns = layers[0].in_features
        for module in dict.fromkeys(reversed(self._order[:first])):
            if len(_weight(module)) == columns and self._exact(module, layers):
                return module
        return None

    @torch.no_grad()
    def _exact(self, module: nn.Module, layers: Sequence[nn.Linear]) -> bool:
        originals = [(w, w.clone()) for w in map(_weight, (module, *layers))]
        scale_(module, layers, torch.linspace(0.5, 2, layers[0].in_features, device=self._x.device))
        off = (self._output() - self._expected).norm() / self._expected.norm()
        for weight, original in originals:
            weight.copy_(original)
        return float(off) < EXACT


def _scalable(module: nn.Module) -> bool:
    """A linear layer or a norm, without a bias, which would have to be scaled, too."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight is not None and len(list(module.parameters())) == 1 and weight.ndim <= 2


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight
