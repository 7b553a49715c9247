"""Reading what `calibrate` wrote."""

from torch import Tensor

from tasks import store
from windquant.salient import Protection, Salient, protect


class BlockStatistics:
    """Statistics of one block's matrices, by the matrix's path inside the block."""

    def __init__(self, block: int) -> None:
        self.block = block
        self._tensors = store.load_tensors(store.path("calibrate") / f"block-{block}.safetensors")

    def moment(self, name: str) -> Tensor:
        """H, (columns, columns)."""
        return self._of_inputs("H", name)

    def scale(self, name: str) -> Tensor:
        """a, (columns,)."""
        return self._of_inputs("a", name)

    def _of_inputs(self, what: str, name: str) -> Tensor:
        """Matrices with the same inputs share what is known of them."""
        return self._tensors[f"{what}.{int(self._tensors[f'source.{name}'])}"]

    def fisher(self, name: str) -> Tensor:
        """g, (rows,)."""
        return self._tensors[f"g.{name}"]


class Statistics:
    """Those of one block after another; the last one is kept."""

    def __init__(self) -> None:
        self._last: BlockStatistics | None = None

    def of(self, block: int) -> BlockStatistics:
        if self._last is None or self._last.block != block:
            self._last = BlockStatistics(block)
        return self._last

    def moment(self, block: int, name: str) -> Tensor:
        return self.of(block).moment(name)


class Protector:
    """`Engine.protect`: salient weights chosen by the reference's activation scales, as the distortion table counts them."""

    def __init__(self, protection: Protection | None, statistics: Statistics | None = None) -> None:
        self._protection, self._statistics = protection, statistics or Statistics()

    def __call__(self, block: int, name: str, w: Tensor) -> Salient | None:
        if self._protection is None:
            return None
        return protect(w, self._statistics.of(block).scale(name).to(w.device), self._protection)
