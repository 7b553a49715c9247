"""SignRound (arXiv 2309.05516) by its authors' library auto-round, an optional extra, and its result as ours are stored."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks import models
from tasks.errors import UserError
from windquant import blocks
from windquant.baselines.affine import AffineMatrix, on_grid, spread
from windquant.errors import InputError
from windquant.streams import Stored

BATCH = 8


def quantize(folder: Path, windows: Tensor, bits: int, group: int, steps: int, seed: int) -> Iterator[dict[str, Stored]]:
    """Every block's matrices, asymmetric. windows: calibration token ids (n, T), learned from in batches of `BATCH`, `steps`
    a block. Raises UserError without the library."""
    model = _rounded(folder, windows, bits, group, steps, seed)
    for block in range(len(blocks.decoder_blocks(model)[1])):
        yield {m.name: _matrix(model.get_submodule(m.name), m.name, bits, group)
               for m in blocks.matrices(model) if m.block == block}  # fmt: skip


def _rounded(folder: Path, windows: Tensor, bits: int, group: int, steps: int, seed: int) -> Any:
    try:
        from auto_round import AutoRound  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("auto-round is not installed; pip install -c constraints.txt -e '.[baselines]'") from None
    model, data = models.load(folder, torch.device("cpu")), [_batch(w) for w in windows]
    rounder = AutoRound(model, models.tokenizer(folder), bits=bits, group_size=group, sym=False, iters=steps,
                        nsamples=len(windows), seqlen=windows.shape[1], batch_size=min(BATCH, len(windows)), dataset=data,
                        device_map="cpu", seed=seed)  # fmt: skip
    return rounder.quantize()[0]


def _batch(window: Tensor) -> dict[str, Tensor]:
    return {"input_ids": window[None], "attention_mask": torch.ones_like(window[None])}


def _matrix(layer: Any, name: str, bits: int, group: int) -> AffineMatrix:
    """The library leaves a layer's rounded weight, scales and zero points; what is stored must give that weight again."""
    shape = layer.weight.shape[0], -(-layer.weight.shape[1] // group)
    scale, zero = (t.view(shape).half() for t in (layer.scale, layer.zp))
    stored = on_grid(layer.weight.float(), scale, zero.to(torch.uint8), bits, group)
    step = spread(scale, group, layer.weight.shape[1]).abs()
    if not bool(((stored.dequantize() - layer.weight.float()).abs() <= 0.02 * step * 2**bits).all()):
        raise InputError(f"{name}: auto-round's scales and zero points do not give its weights; is it version 0.16.1?")
    return stored
