"""What can be known before any work: does it fit on the disk and in memory, and which bits can be reached."""

import math
import shutil
from typing import Protocol

import psutil
from torch import nn

from tasks.errors import UserError
from windquant import blocks, units


class Windows(Protocol):
    @property
    def window(self) -> int: ...
    @property
    def calibration_windows(self) -> int | None: ...


def check(model: nn.Module, config: Windows) -> dict[str, int]:
    """Sizes that the model implies, in bytes. Raises UserError when the disk or the memory is too small."""
    body = blocks.matrices(model)
    weights = sum(m.weights for m in body)
    parameters = sum(p.numel() for p in model.parameters())
    hidden = body[0].columns
    # Every expert has moments of its own: of a fine-grained mixture they take as much room as its weights. Twice, because
    # calibrate keeps them to resume from until it is done.
    moments = 2 * 4 * sum(c * c for c in _distinct_inputs(body))
    tokens = (config.calibration_windows or 0) * config.window
    activations = 4 * 2 * (len({m.block for m in body}) + 1) * tokens * hidden
    facts = {
        "parameters": parameters,
        "body_weights": weights,
        "blocks": len({m.block for m in body}),
        "disk_needed": 4 * parameters + moments + activations + 2 * 2 * parameters,
        # Reference and candidate side by side in float32, and logits of a window.
        "memory_needed": 2 * 4 * parameters + 2**30,
    }
    free, available = shutil.disk_usage(".").free, psutil.virtual_memory().available
    if free < facts["disk_needed"]:
        raise UserError(
            f"the disk has {free / 2**30:.1f} GiB free, this model takes about {facts['disk_needed'] / 2**30:.1f} GiB of "
            f"artifacts; free some space, or lower prepare.calibration_windows"
        )
    if available < facts["memory_needed"]:
        raise UserError(
            f"{available / 2**30:.1f} GiB of memory are available, comparing this model with its reference takes about "
            f"{facts['memory_needed'] / 2**30:.1f} GiB; close other programs or choose a smaller model"
        )
    return facts


def _distinct_inputs(body: list[units.Matrix]) -> list[int]:
    """Columns of the inputs that matrices of a block do not share; q, k, v and gate, up are fed alike."""
    shared = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
    return [m.columns for m in body if m.kind not in shared]


def sentence(facts: dict[str, int]) -> str:
    return (
        f"{facts['parameters'] / 1e6:.3g} M weights, {facts['body_weights'] / 1e6:.3g} M of them to quantize in "
        f"{facts['blocks']} blocks; about {math.ceil(facts['disk_needed'] / 2**30)} GiB of disk and "
        f"{math.ceil(facts['memory_needed'] / 2**30)} GiB of memory"
    )
