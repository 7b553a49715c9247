"""Stage 10: a published method beside ours, at some bits; a matrix of methods and bits, every variant by itself.

Out, a variant: block-<i>.safetensors, codes, scales and zero points as `windquant.baselines` packs them; results.json, a row
like those of benchmark, measured on what was loaded back from the files. A width that a method does not admit makes a row
that says so; a method that fails leaves nothing, and is tried again next time.
"""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tasks import measure, models, progress, signround, store, trained, usage
from tasks.config import Common, by_effort
from tasks.errors import UserError
from tasks.job import Job, Record
from windquant import blocks, checkpoint
from windquant.baselines.methods import METHODS, Peer, stored_of
from windquant.errors import above_zero
from windquant.streams import Stored, named
from windquant.units import effective_bits

log = logging.getLogger("windquant")
BY_LIBRARY = {"signround": (2, 3, 4)}
"""Bits that methods of other people's libraries admit."""
ADMITTED = {name: m.bits for name, m in METHODS.items()} | BY_LIBRARY | dict.fromkeys(trained.METHODS, trained.BITS)


@dataclass(frozen=True)
class BaselinesConfig:
    """methods, bits: what is made, all of one at all of the other. group: columns with a scale and a zero point. windows:
    calibration windows; null: all. learn_steps, learn_tokens: of methods that learn block by block, steps a block and tokens
    a window. train_steps: of methods that train the whole model. at_once: variants that a pipeline makes side by side, which
    share the CPU's threads evenly; null: two, on a GPU one."""

    methods: tuple[str, ...] = ("rtn", "hqq", "gptq")
    bits: tuple[int, ...] = (2,)
    group: int = 64
    windows: int | None = None
    learn_steps: int = 50
    learn_tokens: int = 256
    train_steps: int | None = by_effort(demo=40, full=2000)
    at_once: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("windows", "train_steps", "at_once") if getattr(self, name) is not None]
        above_zero(self, "group", "learn_steps", "learn_tokens", *given)
        unknown = [m for m in self.methods if m not in ADMITTED]
        if unknown:
            raise ValueError(f"methods has '{unknown[0]}', which is not one of {', '.join(ADMITTED)}")
        for name in ("methods", "bits"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is empty or names one twice; give at least one, each once")
        if not all(1 <= b <= 8 for b in self.bits):
            raise ValueError(f"bits {list(self.bits)} are not all between 1 and 8")

    @property
    def variants(self) -> list[str]:
        """Those of one method apart, so that the next one finds done what it shares with the one before."""
        return [f"{m}-{b}" for b in self.bits for m in self.methods]

    def workers(self, common: Common) -> int:
        """How many variants at once."""
        gpu = common.device != "cpu" and torch.cuda.is_available()
        return self.at_once or (1 if gpu else min(2, common.threads or torch.get_num_threads()))

    def settings(self, seed: int) -> dict[str, Any]:
        """What rows are made with, and must have in common to stand in one table."""
        return {k: v for k, v in asdict(self).items() if k not in ("methods", "bits", "at_once")} | {"seed": seed}


def _parsed(variant: str) -> tuple[str, int]:
    method, _, width = variant.rpartition("-")
    if method not in ADMITTED or not width.isdecimal():
        raise UserError(f"'{variant}' is no baseline: <method>-<bits>, with a method of {', '.join(ADMITTED)}")
    return method, int(width)


def run(config: BaselinesConfig, job: Job) -> Record:
    method, bits = _parsed(job.variant)
    manifest = store.load_json(store.path("prepare") / "manifest.json")
    evaluation: measure.BenchmarkConfig = job.section("benchmark")
    row = {"method": method, "bits": bits, "kind": "measured", "facts": _facts(evaluation, manifest)}
    if bits not in ADMITTED[method]:
        admitted = ", ".join(map(str, ADMITTED[method]))
        row |= {"kind": "unsupported", "reason": f"{method} is for {admitted} bits, not {bits}"}
        store.save_json(job.out / "results.json", row)
        log.info("%s", row["reason"])
        return Record(tags={"method": method, "kind": "unsupported"})
    report = progress.bar(f"{method} at {bits} bits")
    with job.scratch.clock("making") as clock:
        for i, block in enumerate(_made(method, bits, config, job, report)):
            store.save_tensors(job.out / f"block-{i}.safetensors", named(block))
    spent = {"seconds": clock.seconds, "peak_gib": usage.peak_gpu_gib() or usage.peak_rss_gib()}
    model, size = load(job.out, bits, config.group, job.device)
    measured = measure.measure(job.variant, model, measure.expected(evaluation, job.device), evaluation, manifest)
    store.save_json(job.out / "results.json", row | size | measured | {"settings": config.settings(job.common.seed)})
    log.info("%s: %.4f effective bits, perplexity %.2f, mean accuracy %.3f, %.0f s", job.variant, size["effective_bits"],
             measured["perplexity"], measured["acc_mean"], spent["seconds"])  # fmt: skip
    return Record(metrics=size | measured | spent, params=row["facts"], tags={"method": method},
                  files=[job.out / "results.json"], extra=spent)  # fmt: skip


def _facts(config: measure.BenchmarkConfig, manifest: dict[str, Any]) -> dict[str, Any]:
    hashes = {k: manifest[k] for k in ("model_hash", "text_hash", "windows_hash")}
    return measure.facts(config, manifest, measure.tasks_of(config)) | hashes


def _made(method: str, bits: int, config: BaselinesConfig, job: Job, report: Any) -> Iterator[dict[str, Stored]]:
    """Every block's matrices, first to last."""
    folder = store.path("prepare") / "model"
    ids = store.load_tensors(store.path("prepare") / "windows" / "calibration.safetensors")["ids"][: config.windows].long()
    if method == "signround":
        tokens, steps, seed = ids[:, : config.learn_tokens], config.learn_steps, job.common.seed
        yield from signround.quantize(folder, tokens, bits, config.group, steps, seed)
    elif method in trained.METHODS:
        yield from trained.quantize(method, bits, config.group, config.train_steps or 1, job)
    else:
        walk = models.walk(folder, job.device)
        peer = Peer(walk, METHODS[method], bits, config.group, job.common.seed, job.scratch, job.variant)
        yield from peer.method.blocks(peer, ids, report)


def load(folder: Path, bits: int, group: int, device: torch.device) -> tuple[Any, dict[str, float]]:
    """The reference with what is stored in a variant's folder in its place, all else in float16 as checkpoints have it; and
    its size: all stored bytes of the matrices, and of the model with them."""
    source = store.path("prepare") / "model"
    model = models.reference(source, device)
    walk = models.walk(source, device)
    body = sum(m.weights for m in blocks.matrices(walk.model))
    rest = checkpoint.others(model)
    with torch.no_grad():
        for name, tensor in rest.items():
            tensor.copy_(checkpoint.store_other(name, tensor))
        size = header = codes = 0
        for i in range(len(walk)):
            file = folder / f"block-{i}.safetensors"
            tensors = store.load_tensors(file)
            header += file.stat().st_size - sum(t.nbytes for t in tensors.values())
            # A norm that took a matrix's scales is as large as before.
            size += sum(t.nbytes for name, t in tensors.items() if f"{name.rpartition('.')[0]}.weight" not in rest)
            codes += sum(t.numel() for name, t in tensors.items() if name.endswith(".codes"))
            for path, stored in stored_of(walk, i, tensors, bits, group).items():
                model.get_submodule(path).weight.copy_(stored.dequantize())
    whole = size + header + 2 * sum(t.numel() for t in rest.values())
    parameters = body + sum(t.numel() for t in rest.values())
    return model, {
        "effective_bits": effective_bits(size, body),
        "effective_bits_model": effective_bits(whole, parameters),
        "effective_bits_paper": effective_bits(codes, body),
        "model_bytes": float(whole),
    }
