"""Layers that compute with packed weights: the tensors stay in memory as they lie in the checkpoint's file.

Many tokens at once (prefill) are multiplied with the dequantized matrix, unpacked for the call: in float32 the result
is that of the dense layer bit for bit. A few tokens (decoding) are multiplied with the grid points unit by unit, and
each unit's sum with its scale: the same number up to the order of rounding, without a pass that scales the matrix.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windquant import unpacking
from windquant.errors import InputError
from windquant.grids import decode
from windquant.packing import DTYPES
from windquant.quantize import PARTS
from windquant.salient import SALIENT_PARTS, Protection, Salient
from windquant.scales import from_log8

FEW = 8
"""Up to so many tokens are multiplied unit by unit."""


@contextmanager
def unpacked(model: nn.Module) -> Iterator[None]:
    """Inside, the model multiplies with unpacked matrices however few the tokens are, as experts see few of many: in
    float32 its results are those of the dense model bit for bit."""
    layers = [m for m in model.modules() if isinstance(m, Packed)]
    before = [m.few for m in layers]
    try:
        for m in layers:
            m.few = 0
        yield
    finally:
        for m, few in zip(layers, before, strict=True):
            m.few = few


class Packed(nn.Module):
    """A packed matrix (rows, columns): `codes`, `scale` and `span` as in `PackedMatrix`, with protection also `salient_...`
    as in `Salient`, and the weights they stand for."""

    codes: Tensor
    scale: Tensor
    span: Tensor
    like: Tensor

    def __init__(self, rows: int, columns: int, chunk_size: int, symbols: str, protection: Protection | None = None) -> None:
        """Empty tensors of the shapes that plan and protection imply. Raises InputError when the plan does not fit the
        columns."""
        super().__init__()
        self.rows, self.columns = rows, columns
        self.runs = unpacking.layout(rows, columns, chunk_size, symbols)
        self.few = FEW
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None
        self._salient = tuple(SALIENT_PARTS) if protection else ()
        shapes = unpacking.shapes(self.runs) | (protection.shapes(rows, columns) if protection else {})
        for part, dtype in (PARTS | SALIENT_PARTS).items():
            if part in shapes:
                self.register_buffer(part, torch.empty(shapes[part], dtype=DTYPES[dtype]))
        # Follows the model's casts, as a dense layer's parameter would.
        self.register_buffer("like", torch.empty(0), persistent=False)

    def check(self) -> None:
        """Raises InputError when what was loaded cannot be: scales that are NaN or infinite, positions out of range."""
        salient = self.salient
        spans = {"its": self.span} | ({"its salient weights'": salient.span} if salient else {})
        for whose, span in spans.items():
            low, step = span.float().unbind(-1)
            if not bool((low + 254 * step < 128).all()):  # NaN is not below either; 2^128 is infinite
                raise InputError(f"the range of {whose} scales holds NaN, or reaches infinity")
        if salient:
            salient.index()

    @property
    def salient(self) -> Salient | None:
        return Salient.of(self.rows, self.columns, {part: getattr(self, part) for part in self._salient})

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights, (rows, columns)."""
        w = unpacking.dequantize(self.codes, self.scale, self.span, self.runs, dtype)
        if salient := self.salient:
            salient.place_(w)
        return w

    @property
    def weight(self) -> Tensor:
        """The weights, unpacked for this call: for code that looks at a layer's dtype, device or values."""
        return self.dequantize(self.like.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., columns) -> x w^T + bias (..., rows), in the dtype of x."""
        tokens = x.numel() // self.columns
        if tokens > self.few:
            return F.linear(x, self.dequantize(x.dtype), bias)
        out = self._multiply_few(x.reshape(tokens, self.columns)).to(x.dtype).reshape(*x.shape[:-1], self.rows)
        return out if bias is None else out + bias

    def _multiply_few(self, x: Tensor) -> Tensor:
        """x (tokens, columns) -> (tokens, rows) float32."""
        if x.dtype == torch.float16:
            x = x.float()  # a unit's sum has its scale still to come, and would pass what float16 holds
        s, salient = from_log8(self.scale, self.span), self.salient
        if salient is None:
            return unpacking.multiply(x, self.codes, s, self.runs)
        if salient.by_column:
            index = salient.index()
            return unpacking.multiply(x.index_fill(1, index, 0), self.codes, s, self.runs) + salient.multiply(x, index)
        row, column, w = self._beyond(salient, s)
        out = unpacking.multiply(x, self.codes, s, self.runs)
        return out.index_add_(1, row, x[:, column].float() * w)

    def _beyond(self, salient: Salient, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and columns of single salient weights, and what they are beyond what the code 0 stands for in their places;
        (n,) each. s: the scales (units with a scale, rows, 1). Worked out for the first few tokens and kept: 12 bytes a
        salient weight, in place of most of the time that decoding would take."""
        if self._kept is None:
            with torch.inference_mode(False), torch.no_grad():  # kept for calls in any mode
                index = salient.index()
                row, column = index // self.columns, index % self.columns
                zero = torch.zeros(len(index), device=index.device)
                for run in self.runs:
                    inside = (column >= run.columns.start) & (column < run.columns.stop)
                    if run.grid.has_scale:
                        unit = run.scaled.start + (column[inside] - run.columns.start) // run.width
                        zero[inside] = run.grid.offset * s[unit, row[inside], 0]
                self._kept = row.int(), column.int(), salient.values(row) - zero
        row, column, w = self._kept
        return row.long(), column.long(), w

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves to another device; a cast of the model must not cast the range of its scales."""
        spans = {name: b for name, b in self._buffers.items() if name.endswith("span") and b is not None}
        super()._apply(fn, recurse)
        self._kept = None
        for name, span in spans.items():
            cast = getattr(self, name)
            if cast.dtype != span.dtype:
                setattr(self, name, span.to(cast.device))
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._kept = None

    def extra_repr(self) -> str:
        bits = 8 * self.codes.numel() / (self.rows * self.columns)
        return f"in_features={self.columns}, out_features={self.rows}, bits={bits:.2f}"


class PackedLinear(Packed):
    """nn.Linear with a packed matrix; bias, if any, in the model's dtype."""

    def __init__(
        self,
        rows: int,
        columns: int,
        chunk_size: int,
        symbols: str,
        bias: bool = False,
        protection: Protection | None = None,
    ) -> None:
        super().__init__(rows, columns, chunk_size, symbols, protection)
        self.in_features, self.out_features = columns, rows
        self.bias = nn.Parameter(torch.zeros(rows), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)


class PackedEmbedding(Packed):
    """nn.Embedding with a packed table at 4 or 8 bits; unpacks the rows that are looked up, into the model's dtype."""

    def __init__(self, rows: int, columns: int, chunk_size: int, symbols: str) -> None:
        super().__init__(rows, columns, chunk_size, symbols)
        self.num_embeddings, self.embedding_dim = rows, columns

    def forward(self, ids: Tensor) -> Tensor:
        rows = ids.flatten()
        s = from_log8(self.scale.index_select(1, rows), self.span)  # which refuses negative ids
        out = torch.empty(len(rows), self.columns, dtype=self.like.dtype, device=ids.device)
        for run in self.runs:
            w = decode(unpacking.row_codes(self.codes, run, rows), s[run.scaled], run.grid)
            unpacking.place_(out, w, run)
        return out.view(*ids.shape, self.columns)


class TiedHead(nn.Module):
    """The output layer of a model whose head is its packed embedding: holds no table of its own."""

    def __init__(self, embedding: PackedEmbedding, bias: nn.Parameter | None) -> None:
        super().__init__()
        self._embedding = [embedding]  # in a list, lest its tensors be saved twice
        self.in_features, self.out_features, self.bias = embedding.columns, embedding.rows, bias

    @property
    def weight(self) -> Tensor:
        return self._embedding[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self._embedding[0].multiply(x, self.bias)
