"""Stage 5: every plan applied, packed into a checkpoint, loaded back and compared.

Out: <plan>/ a checkpoint folder a plan, bytes.json their bytes counted from the files.
"""

import logging
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tasks import models, packed, plans, progress, store
from tasks.errors import UserError
from tasks.job import Job, Record
from tasks.statistics import BlockStatistics
from windquant import blocks, checkpoint
from windquant.grids import GRIDS
from windquant.quantize import PackedMatrix, quantize_matrix

log = logging.getLogger("windquant")
COPIED = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template", "generation_config")


@dataclass(frozen=True)
class QuantizeConfig:
    """check_tokens: length of the text on which the reloaded checkpoint's logits must equal the quantized model's."""

    check_tokens: int = 128

    def __post_init__(self) -> None:
        if self.check_tokens < 1:
            raise ValueError(f"check_tokens {self.check_tokens} is not at least 1")


def run(config: QuantizeConfig, job: Job) -> Record:
    source = store.path("prepare") / "model"
    record, counts = Record(), {}
    for file in sorted(store.path("allocate").glob("*.parquet")):
        plan = plans.load_plan(file)
        began = time.monotonic()
        counts[file.stem] = _quantize(source, plan, job.out / file.stem, config, job)
        record.extra.setdefault("seconds", {})[file.stem] = time.monotonic() - began
        record.children[file.stem] = Record(
            metrics={f"bytes/{k}": float(v) for k, v in asdict(counts[file.stem]).items()}
            | {"effective_bits": counts[file.stem].effective_bits, "model_bytes": float(counts[file.stem].model)},
            tags={"method": file.stem},
        )
    store.save_json(job.out / "bytes.json", {name: summary(c) for name, c in counts.items()})
    record.files.append(job.out / "bytes.json")
    return record


def summary(c: checkpoint.Bytes) -> dict[str, float]:
    totals = ("body", "model", "effective_bits", "effective_bits_model", "effective_bits_paper")
    return asdict(c) | {name: getattr(c, name) for name in totals}


def _quantize(source: Path, plan: plans.Plan, out: Path, config: QuantizeConfig, job: Job) -> checkpoint.Bytes:
    name = out.name
    walk = models.walk(source, job.device)
    if not walk.fits([u.matrix for u in plan.body]):
        raise UserError(f"plan {name} is for another model than artifacts/prepare/model; run `dvc repro allocate`")
    dense: dict[str, torch.Tensor] = {}
    writer = checkpoint.Writer(out)
    report = progress.bar(f"rounding and packing {name}")
    for i in range(len(walk)):
        for matrix, (stored, weight) in _resumable(walk, i, plan, name, job).items():
            writer.add_matrix(matrix, stored)
            dense[f"{matrix}.weight"] = weight
        report(i + 1, len(walk))
    names = checkpoint.others(walk.model)
    for other, tensor in walk.source(lambda n: n in names).items():
        half = checkpoint.store_other(other, tensor)
        writer.add(other, half)
        dense[other] = half.float()
    writer.close(models.config(source).to_dict(), plan.header["chunk_size"])
    for f in source.iterdir():
        if f.name.startswith(COPIED):
            shutil.copyfile(f, out / f.name)
    shutil.copyfile(store.path("allocate") / f"{name}.parquet", out / "plan.parquet")
    count = checkpoint.count(out)
    if count.body != plan.size:
        raise AssertionError(f"{name}: the files hold {count.body} bytes of matrices, the plan said {plan.size}")
    _compare_logits(source, out, dense, config, job)
    log.info("%s: %.4f effective bits, %.1f MB, reloaded with equal logits", name, count.effective_bits, count.model / 1e6)
    return count


def _resumable(
    walk: blocks.Walk, index: int, plan: plans.Plan, name: str, job: Job
) -> dict[str, tuple[PackedMatrix, torch.Tensor]]:
    """`_block`, or what an interrupted run kept of it (packed; the weights are unpacked again)."""
    key, chunk = f"{name}-{index}", plan.header["chunk_size"]
    if not job.scratch.has(key):
        made = _block(walk, index, plan, job)
        job.scratch.put(key, {f"{m}.{part}": getattr(p, part) for m, (p, _) in made.items() for part in checkpoint.PARTS})
        return made
    kept, out = job.scratch.get(key), {}
    for m in dict.fromkeys(u.matrix for u in plan.body if u.matrix.block == index):
        symbols = "".join(GRIDS[b].symbol for b in plan.of(m.name))
        parts = {part: kept[f"{m.name}.{part}"] for part in checkpoint.PARTS}
        packed = PackedMatrix(m.rows, m.columns, chunk, symbols, **parts)
        out[m.name] = packed, packed.dequantize()
    return out


def _block(walk: blocks.Walk, index: int, plan: plans.Plan, job: Job) -> dict[str, tuple[PackedMatrix, torch.Tensor]]:
    """matrix -> packed, and the weights as they were rounded, before packing."""
    statistics, out = BlockStatistics(index), {}
    with walk.block(index) as block:
        for name, linear in blocks.linears(block).items():
            full = f"{walk.prefix}.{index}.{name}"
            H = statistics.moment(name).to(walk.device)
            try:
                out[full] = quantize_matrix(linear.weight, H, plan.of(full), plan.header["chunk_size"])
            except ValueError as e:
                raise UserError(f"{full}: {e}") from e
    return out


@torch.inference_mode()
def _compare_logits(source: Path, folder: Path, dense: dict[str, torch.Tensor], config: QuantizeConfig, job: Job) -> None:
    """The reloaded checkpoint's logits against those of the weights as they were before packing: equal, in float32."""
    ids = store.load_tensors(store.path("prepare") / "windows" / "validation.safetensors")["ids"]
    ids = ids[:1, : config.check_tokens].long().to(job.device)
    memory = models.skeleton(models.config(source))
    memory.load_state_dict({k: v.to(job.device) for k, v in dense.items()}, strict=False, assign=True)
    memory.tie_weights()
    expected = memory.eval().to(job.device)(input_ids=ids, use_cache=False).logits
    loaded = packed.load(folder, job.device)
    difference = (loaded(input_ids=ids, use_cache=False).logits - expected).abs().max()
    if not difference == 0:
        raise AssertionError(f"{folder.name}: reloaded logits differ from the quantized model's by {difference:g}")
