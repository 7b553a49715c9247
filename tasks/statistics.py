"""Reading what `calibrate` wrote."""

from torch import Tensor

from tasks import store


class BlockStatistics:
    """Statistics of one block's matrices, by the matrix's path inside the block."""

    def __init__(self, block: int) -> None:
        self.block = block
        self._tensors = store.load_tensors(store.path("calibrate") / f"block-{block}.safetensors")

    def moment(self, name: str) -> Tensor:
        """H, (columns, columns)."""
        return self._tensors[f"H.{int(self._tensors[f'source.{name}'])}"]

    def fisher(self, name: str) -> Tensor:
        """g, (rows,)."""
        return self._tensors[f"g.{name}"]
