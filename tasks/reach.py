"""What the dial, `target_bits` or `target_size`, can be set to for a model, and the bits that it asks for."""

import math
from dataclasses import dataclass

from torch import nn

from tasks.errors import UserError
from windquant import blocks, checkpoint, units
from windquant.allocate import AllocateConfig, parse_size


@dataclass(frozen=True)
class Reach:
    """What the dial can be set to: effective bits of the body, and bytes of the whole model file."""

    bits: tuple[float, float]
    other_bytes: int
    body_weights: int
    chunk_size: int

    @classmethod
    def of(cls, body: list[units.Unit], other_bytes: int, chunk_size: int) -> "Reach":
        return cls(units.bits_range(body), other_bytes, units.weights_in(body), chunk_size)

    @property
    def sizes(self) -> tuple[int, int]:
        return tuple(math.ceil(self.other_bytes + b * self.body_weights / 8) for b in self.bits)  # pyright: ignore[reportReturnType]

    def __str__(self) -> str:
        low, high = self.bits
        small, large = self.sizes
        return (
            f"target_bits can be {math.ceil(low * 100) / 100:g} to {math.floor(high * 100) / 100:g}, "
            f"target_size {small / 1e6:.4g}MB to {large / 1e6:.4g}MB ({self.other_bytes / 1e6:.3g}MB of it embeddings and "
            f"the rest, kept at 16 bits)"
        )

    def target_bits(self, config: AllocateConfig) -> float:
        """The effective bits that the dial asks for. Raises UserError when they are out of reach."""
        if config.target_size is None:
            bits, dial = config.target_bits, f"allocate.target_bits {config.target_bits:g}"
        else:
            bits = 8 * (parse_size(config.target_size) - self.other_bytes) / self.body_weights
            dial = f"allocate.target_size {config.target_size}"
        if not self.bits[0] <= bits <= self.bits[1]:
            raise UserError(f"{dial} is out of reach for this model: {self}")
        return bits


def reach(model: nn.Module, chunk_size: int | None) -> Reach:
    chunk_size = chunk_size or units.chunk_size_for(sum(p.numel() for p in model.parameters()))
    other = checkpoint.other_bytes(model) + checkpoint.header_bound(model)
    return Reach.of(units.cut(blocks.matrices(model), chunk_size), other, chunk_size)
