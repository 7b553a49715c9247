"""What stages ask of the reference alone, and all would compute alike: kept in .state/shared/ for the next that asks.

A folder is named by all that its contents depend on, the number of threads among it, so that nothing stale is taken; what
nobody has asked for in a day is deleted.
"""

import contextlib
import hashlib
import importlib.metadata
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock
from torch import Tensor

from tasks import models, store
from windquant import blocks, experts

DAY = 24 * 3600


class Shared:
    """Named sets of tensors that the reference in artifacts/prepare/model gives on a device. code: the modules that compute
    them, besides those that build the model. files: what they are computed from, too."""

    def __init__(self, device: torch.device, code: Iterable[ModuleType], files: Iterable[Path] = ()) -> None:
        sources = [Path(str(m.__file__)) for m in (models, blocks, experts, *code)]
        versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
        hashes = [store.hash_tree(store.path("prepare") / "model"), *map(store.hash_file, [*sources, *files])]
        made_with = " ".join([*hashes, *versions, device.type, str(torch.get_num_threads())])
        self.folder = store.state("shared") / hashlib.sha256(made_with.encode()).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.touch()
        for other in self.folder.parent.iterdir():
            with contextlib.suppress(FileNotFoundError):  # a run beside this one was faster
                if other != self.folder and other.stat().st_mtime < time.time() - DAY:
                    shutil.rmtree(other, ignore_errors=True)

    def alone(self, name: str) -> FileLock:
        """To hold while it is looked for and made: stages that run side by side and ask at once wait for each other."""
        return FileLock(self.folder / f"{name}.lock")

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def has(self, name: str) -> bool:
        return self._file(name).exists()

    def get(self, name: str) -> dict[str, Tensor]:
        self.folder.touch()
        return store.load_tensors(self._file(name))

    def put(self, name: str, tensors: dict[str, Tensor]) -> None:
        store.save_tensors(self._file(name), tensors)
