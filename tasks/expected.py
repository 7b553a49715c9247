"""What the reference expects of held-out text. All models are compared with it on the same windows, so its log-probabilities
are computed once and kept on disk for the stages that ask, unless they take more than KEPT."""

import importlib.metadata
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tasks import models, store
from windquant.evaluate import log_probabilities

KEPT = 4 * 2**30
"""Bytes: the demo's 16 windows of 1,024 tokens of a vocabulary of 49,152 words take three quarters of it."""


class Expected:
    """Of the windows (n, T) of a split: called with i, log-probabilities (T - 1, vocabulary), float32, of window i."""

    def __init__(self, split: str, ids: Tensor, device: torch.device) -> None:
        self.split, self.ids, self.device = split, ids, device
        manifest = store.load_json(store.path("prepare") / "manifest.json")
        made = [manifest["model_hash"], manifest["windows_hash"], device.type]
        made += [importlib.metadata.version(name) for name in ("torch", "transformers")]
        self._scratch = store.Scratch("expected", " ".join(made))

    @cached_property
    def model(self) -> Any:
        """The reference, loaded when it is needed."""
        return models.reference(store.path("prepare") / "model", self.device)

    def __call__(self, i: int) -> Tensor:
        name = f"{self.split}-{i}"
        if self._scratch.has(name):
            return self._scratch.get(name)["logp"]
        logp = log_probabilities(self.model, self.ids[i].to(self.device))
        if logp.nbytes * len(self.ids) <= KEPT:
            self._scratch.put(name, {"logp": logp})
        return logp
