"""What a stage is given and what it gives back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.config import Common
from tasks.errors import UserError
from tasks.store import Scratch


@dataclass(frozen=True)
class Job:
    """out: an empty folder that becomes artifacts/<stage> when the stage succeeds. scratch: its resume state.
    check_target: raises when the params' target cannot be reached with a model (known before any weight is read).
    variant: of a stage that is a matrix. section: other sections of the params; only what dvc.yaml tracks may be read.
    """

    stage: str
    common: Common
    out: Path
    scratch: Scratch
    check_target: Callable[[nn.Module], str] = lambda model: ""
    variant: str = ""
    section: Callable[[str], Any] = lambda name: None

    @property
    def device(self) -> torch.device:
        want = self.common.device
        if want == "auto":
            want = "cuda" if torch.cuda.is_available() else "cpu"
        if want == "cuda" and not torch.cuda.is_available():
            raise UserError("common.device is 'cuda' but torch sees no GPU here; set it to auto or cpu")
        return torch.device(want)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.common.seed)


@dataclass
class Record:
    """What MLflow is told. tables: name -> columns. curves: name -> a metric's values, step by step. files: logged as
    artifacts. children: runs nested in this one. published: runs of numbers that others measured, made once. extra: goes
    into artifacts/runs/<stage>.json beside the usage."""

    metrics: dict[str, float] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    tables: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    children: dict[str, "Record"] = field(default_factory=dict)
    published: dict[str, "Record"] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
