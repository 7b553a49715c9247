"""What the reference expects of held-out text. All models are compared with it on the same windows, so its log-probabilities
are computed once and kept for the stages that ask, unless they take more than KEPT, or half of what the disk has free."""

import logging
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from tasks import models, store
from tasks.shared import Shared
from windquant import evaluate

log = logging.getLogger("windquant")
KEPT = 4 * 2**30
"""Bytes a split: the demo's 16 windows of 1,024 tokens of a vocabulary of 49,152 words take three quarters of it."""


class Expected:
    """Of the first n windows of a split: called with i, log-probabilities (T - 1, vocabulary), float32, of window i."""

    def __init__(self, split: str, n: int | None, device: torch.device) -> None:
        file = store.path("prepare") / "windows" / f"{split}.safetensors"
        self.split, self.ids, self.device = split, store.load_tensors(file)["ids"][:n].long(), device
        self._shared = Shared(device, [evaluate], [file])

    @cached_property
    def model(self) -> Any:
        """The reference, loaded when it is needed."""
        return models.reference(store.path("prepare") / "model", self.device)

    def __call__(self, i: int) -> Tensor:
        name = f"{self.split}-{i}"
        with self._shared.alone(name):
            return self._logp(name, i)

    def _logp(self, name: str, i: int) -> Tensor:
        if self._shared.has(name):
            return self._shared.get(name)["logp"]
        logp = evaluate.log_probabilities(self.model, self.ids[i])
        size = logp.nbytes * len(self.ids)
        if size <= KEPT and size <= shutil.disk_usage(Path()).free / 2:
            try:
                self._shared.put(name, {"logp": logp})
            except (OSError, SafetensorError) as e:
                log.warning(
                    "what the reference expects of window %d could not be kept (%s); it will be computed again", i, e
                )
        return logp
