"""Codes to bytes and back, one inverse pair a width.

Notation: c (units, weights) uint8 codes; packed (units, grid.code_bytes(weights)) uint8. Each unit is padded to whole
groups, so that units can be cut out of a file without touching their neighbours.
"""

import torch
from torch import Tensor

from windquant.grids import Grid

_POWERS_OF_3 = (1, 3, 9, 27, 81)


DTYPES = {"U8": torch.uint8, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32,
          "I64": torch.int64}  # fmt: skip
"""What a safetensors header calls them."""


def pack(c: Tensor, grid: Grid) -> Tensor:
    """Pack codes: 8 a byte at 1 bit, 5 at 1.58, 4 at 2, 2 at 4, 8 in three bytes at 3, one a byte at 8."""
    if grid.bits == 8:
        return c.contiguous()
    units, weights = c.shape
    n = grid.codes_per_group
    padded = torch.nn.functional.pad(c, (0, -weights % n)).view(units, -1, n).to(torch.int32)
    factors = [_POWERS_OF_3[i] if grid.bits == 1.58 else 1 << (i * int(grid.bits)) for i in range(n)]
    word = (padded * torch.tensor(factors, dtype=torch.int32, device=c.device)).sum(-1, dtype=torch.int32)
    parts = [(word >> (8 * i)) & 255 for i in range(grid.bytes_per_group)]
    return torch.stack(parts, -1).to(torch.uint8).view(units, -1)


def unpack(packed: Tensor, weights: int, grid: Grid) -> Tensor:
    """Inverse of `pack`: (units, bytes) -> (units, weights) uint8 codes."""
    if grid.bits == 8:
        return packed[:, :weights]
    units, n = packed.shape[0], grid.codes_per_group
    groups = packed.view(units, -1, grid.bytes_per_group).to(torch.int32)
    word = sum(groups[..., i] << (8 * i) for i in range(grid.bytes_per_group))
    assert isinstance(word, Tensor)
    if grid.bits == 1.58:
        codes = [(word // p) % 3 for p in _POWERS_OF_3]
    else:
        b = int(grid.bits)
        codes = [(word >> (i * b)) & (grid.levels - 1) for i in range(n)]
    return torch.stack(codes, -1).to(torch.uint8).view(units, -1)[:, :weights]
