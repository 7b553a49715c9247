"""Loading checkpoints of ours."""

from pathlib import Path
from typing import Any

import torch

from tasks import models
from tasks.errors import UserError
from windquant import checkpoint


def load(folder: Path, device: torch.device) -> Any:
    """A packed checkpoint as a dense float32 model. Raises UserError when it is not whole."""
    try:
        checkpoint.read_quantization(folder)
        return checkpoint.load(folder, models.skeleton(models.config(folder)), device)
    except checkpoint.CheckpointError as e:
        raise UserError(str(e)) from e
