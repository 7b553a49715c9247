"""What the dial, `target_bits` or `target_size`, can be set to for a model, and the bits that it asks for."""

import contextlib
import math
from dataclasses import dataclass

from torch import nn

from tasks.errors import UserError
from windquant import blocks, checkpoint, embeddings, units
from windquant.allocate import Target, parse_size
from windquant.errors import InputError
from windquant.salient import Protection, total_size


@dataclass(frozen=True)
class Reach:
    """What the dial can be set to: effective bits of the body, and bytes of the whole model file."""

    bits: tuple[float, float]
    other_bytes: int
    body_weights: int
    chunk_size: int

    @classmethod
    def of(cls, body: list[units.Unit], other_bytes: int, chunk_size: int, protection: Protection | None = None) -> "Reach":
        bits = units.bits_range(body, total_size(protection, body))
        return cls(bits, other_bytes, units.weights_in(body), chunk_size)

    @property
    def sizes(self) -> tuple[int, int]:
        return tuple(math.ceil(self.other_bytes + b * self.body_weights / 8) for b in self.bits)  # pyright: ignore[reportReturnType]

    def __str__(self) -> str:
        low, high = self.bits
        small, large = self.sizes
        return (
            f"target_bits can be {math.ceil(low * 100) / 100:g} to {math.floor(high * 100) / 100:g}, "
            f"target_size {small / 1e6:.4g}MB to {large / 1e6:.4g}MB ({self.other_bytes / 1e6:.3g}MB of it embeddings and "
            f"the rest)"
        )

    def target_bits(self, config: Target) -> float:
        """The effective bits that the dial asks for. Raises UserError when they are out of reach."""
        if config.target_size is None:
            bits, dial = config.target_bits, f"allocate.target_bits {config.target_bits:g}"
        else:
            bits = 8 * (parse_size(config.target_size) - self.other_bytes) / self.body_weights
            dial = f"allocate.target_size {config.target_size}"
        if not self.bits[0] <= bits <= self.bits[1]:
            raise UserError(f"{dial} is out of reach for this model: {self}")
        return bits


def reach(
    model: nn.Module, chunk_size: int | None, embedding_bits: int | None = None, protection: Protection | None = None
) -> Reach:
    """Raises UserError when the model's embeddings cannot be packed and embedding_bits asks for it."""
    chunk_size = chunk_size or units.chunk_size_for(sum(p.numel() for p in model.parameters()))
    body = units.cut(blocks.matrices(model), chunk_size)
    if embedding_bits is None:
        return Reach.of(body, checkpoint.other_bytes(model, protection=protection), chunk_size, protection)
    try:
        packed = units.cut(embeddings.matrices(model), chunk_size)
    except InputError as e:
        raise UserError(f"{e} (allocate.embedding_bits: null)") from e
    other = checkpoint.other_bytes(model, packed, embedding_bits, protection)
    return Reach.of(body, other, chunk_size, protection)


def other_bytes_by_bits(model: nn.Module, chunk_size: int | None, protection: Protection | None = None) -> dict[str, int]:
    """Bytes beside the body at every `allocate.embedding_bits` that the model can have; `null` is not packed."""
    out = {"null": reach(model, chunk_size, None, protection).other_bytes}
    with contextlib.suppress(UserError):
        out |= {str(bits): reach(model, chunk_size, bits, protection).other_bytes for bits in embeddings.BITS}
    return out
