"""One model through the engine and the checkpoint writer, timed and measured by phase; `benchmarks.scale` starts it.

`python -m benchmarks.scale_run <folder> <small model> <model>` prints {"seconds": {phase: s}, "peak": {phase: bytes}}. A
phase is a wrapper around a function of the library; what is called inside another's phase counts for itself alone. The
small model goes the whole way first: what that leaves in the process (code, threads, caches of kernels) is needed by any
model, and is the baseline that peaks are counted from.
"""

import itertools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from tasks import models, store
from windquant import blocks, checkpoint, engine, memory
from windquant.calibrate import Inputs
from windquant.quantize import PackedMatrix
from windquant.reconstruct import Latent, ReconstructConfig

WINDOWS, TOKENS, STEPS, BATCH, CHUNK = 8, 32, 2, 4, 256
WIDTHS = (2, 3, 2, 2)


class Meter:
    """Seconds and peak resident bytes of the phase that is on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.peak: dict[str, int] = defaultdict(int)
        self.phase = "other"
        self.baseline = 0
        self.reset()

    def reset(self) -> None:
        """Start anew, from what is resident now; the C library first gives back what it only keeps for later."""
        memory.trim()
        self.seconds.clear()
        self.peak.clear()
        self._restart()
        self.baseline = _kilobytes("VmRSS") * 1024

    def _restart(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the high water falls to what is resident
        self.since = time.perf_counter()

    def enter(self, phase: str) -> str:
        """Close the phase that is on and open another; returns the closed one's name."""
        before = self.phase
        self.seconds[before] += time.perf_counter() - self.since
        self.peak[before] = max(self.peak[before], _kilobytes("VmHWM") * 1024 - self.baseline)
        self.phase = phase
        self._restart()
        return before

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Every call of `owner.name` becomes part of a phase."""
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            before = self.enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(before)

        setattr(owner, name, measured)


def _kilobytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise AssertionError(f"/proc/self/status has no {field}")


PHASES = [
    (blocks.Walk, "embed", "embed"),
    (blocks, "_assign", "read"),
    (engine.Engine, "_forward", "forward"),
    (Inputs, "_add", "moments"),
    (Latent, "__init__", "fit"),
    (engine, "reconstruct", "step: products"),
    (Latent, "quantize", "step: round"),
    (Latent, "learn_", "step: learn"),
    (Latent, "rounded", "pack"),
    (engine, "pack_matrix", "pack"),
    (PackedMatrix, "dequantize", "pack"),
    (store.Scratch, "put", "keep"),
    (checkpoint.Writer, "add", "write"),
    (checkpoint.Writer, "close", "write"),
]


def quantize(source: Path, out: Path) -> None:
    """What the quantize stage does with a model, but for loading the result to look at it."""
    walk = models.walk(source, torch.device("cpu"))
    columns = {m.name: m.columns for m in blocks.matrices(walk.model)}

    def plan(name: str) -> list[float]:
        return list(itertools.islice(itertools.cycle(WIDTHS), -(-columns[name] // CHUNK)))

    vocabulary = models.config(source).vocab_size
    windows = torch.randint(vocabulary, (WINDOWS, TOKENS), generator=torch.Generator().manual_seed(0))
    scratch, config = store.Scratch(source.name, ""), ReconstructConfig(STEPS, BATCH)
    made = engine.Engine(walk, plan, CHUNK, config, 0, scratch, "plan", lambda sentence: None)
    entries = {m.name: checkpoint.entry(m, plan(m.name)) for m in blocks.matrices(walk.model)}
    writer = checkpoint.Writer(out, checkpoint.Quantization(CHUNK, entries, {}), checkpoint.shard_bytes(walk.model))
    for block in made.run(windows, lambda done, total: None):
        for name, packed in block.items():
            writer.add_matrix(name, packed)
    for name in checkpoint.others(walk.model).keys() & models.shards(source).keys():  # the head is tied
        writer.add(name, checkpoint.store_other(name, walk.source(lambda n, name=name: n == name)[name]))
    writer.close(models.config(source).to_dict())


def main(folder: str, small: str, model: str) -> None:
    memory.return_large()  # as `python -m tasks` does
    os.chdir(folder)  # the scratch store lies in the working directory
    meter = Meter()
    for owner, name, phase in PHASES:
        meter.wrap(owner, name, phase)
    quantize(Path(small), Path("out") / small)
    meter.reset()
    quantize(Path(model), Path("out") / model)
    meter.enter("other")
    print(json.dumps({"seconds": meter.seconds, "peak": meter.peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
