"""Where a few of many places are: an ascending list of numbers in little more than its entropy (Elias 1974, Fano 1971).

The low bits of every number are written out, floor(log2(universe / n)) of them; what is left of the numbers rises slowly,
and its steps are written in unary. The size follows from n and the universe alone, and is within 0.6 bit a number of the
entropy of a random choice where no more than a tenth of the universe is listed.

Notation: index (n,) int64 ascending, without repeats, below `universe`; packed (size(n, universe),) uint8, low bits first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from windquant.errors import InputError
from windquant.grids import GRIDS
from windquant.packing import pack, unpack

WINDOW = 17
"""Low bits of a number lie within three bytes, whatever bit they start at."""


def low_bits(n: int, universe: int) -> int:
    """floor(log2(universe / n))."""
    return (universe // n).bit_length() - 1


def size(n: int, universe: int) -> int:
    """Bytes of n numbers below `universe`, n >= 1."""
    low = low_bits(n, universe)
    return -(-(n * low + n + (universe >> low) + 1) // 8)


def encode(index: Tensor, universe: int) -> Tensor:
    """Pack an index, at least universe / 2^18 numbers of it."""
    n, low = len(index), low_bits(len(index), universe)
    assert low <= WINDOW
    bits = torch.zeros(8 * size(n, universe), dtype=torch.uint8, device=index.device)
    each = torch.arange(n, device=index.device)
    bits[: n * low] = ((index[:, None] >> torch.arange(low, device=index.device)) & 1).flatten()
    bits[n * low + (index >> low) + each] = 1
    return pack(bits[None], GRIDS[1])[0]


def decode(packed: Tensor, n: int, universe: int) -> Tensor:
    """Inverse of `encode`. Raises InputError when the bytes are not of n numbers below `universe`."""
    low, device = low_bits(n, universe), packed.device
    each, (skipped, first) = torch.arange(n, device=device), divmod(n * low, 8)
    rest = packed[skipped:]
    high = unpack(rest[None], 8 * len(rest), GRIDS[1])[0, first:].nonzero()[:, 0]
    if len(high) == n:
        start = each * low
        byte, padded = start // 8, F.pad(packed, (0, 2)).int()
        word = padded[byte] | padded[byte + 1] << 8 | padded[byte + 2] << 16
        index = (high - each << low) | (word >> start % 8 & (1 << low) - 1)
        if bool((index < universe).all()):
            return index
    raise InputError(f"the positions of salient weights are damaged: they do not list {n} numbers below {universe}")
