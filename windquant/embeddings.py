"""The embedding and the head, stored at 4 or 8 bits on the grids of the body.

A row of a chunk of columns has one scale, as in a unit of the body. An embedding's rows are looked up, not multiplied with
activations, so every error counts alike: rounding is to nearest, scales are fitted to identity moments.
"""

from typing import Any

import torch
from torch import Tensor, nn

from windquant.errors import InputError
from windquant.grids import GRIDS
from windquant.quantize import PackedMatrix, round_units
from windquant.units import Matrix, columns_of

BITS = (4, 8)


def matrices(model: Any) -> list[Matrix]:
    """The embedding, and the head unless it is tied to it, of a causal language model of transformers.

    Raises InputError when one of them is of a class of its own (a scaled embedding, for one), which a packed table could
    not stand in for.
    """
    found = []
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is None or any(module.weight is m.weight for _, m in found):
            continue
        name = next(n for n, m in model.named_modules() if m is module)
        if type(module) not in (nn.Embedding, nn.Linear):
            raise InputError(f"{name} is a {type(module).__name__}, which cannot be packed; leave it at 16 bits")
        found.append((name, module))
    return [Matrix(name, -1, *m.weight.shape) for name, m in found]


def quantize(w: Tensor, bits: float, chunk_size: int) -> tuple[PackedMatrix, Tensor]:
    """Round and pack a table (rows, columns) at one width, a chunk of columns at a time. Returns what is stored, and the
    same as weights."""
    parts, dense = [], torch.empty_like(w)
    start = 0
    for width in columns_of(w.shape[1], chunk_size):
        unit = slice(start, start + width)
        rounded = round_units(w[None, :, unit], torch.eye(width, device=w.device)[None], bits)
        dense[:, unit] = rounded.weights()[0]
        parts.append((rounded.packed()[0], rounded.scale[0], rounded.span[0]))
        start += width
    codes, scale, span = zip(*parts, strict=True)
    rows, columns = w.shape
    symbols = GRIDS[bits].symbol * len(parts)
    packed = PackedMatrix(rows, columns, chunk_size, symbols, torch.cat(codes), torch.stack(scale), torch.stack(span))
    return packed, dense
