"""Stage 5: every plan applied, packed into a checkpoint, loaded back and compared.

Out: <plan>/ a checkpoint folder a plan, with its card README.md (and bf16/, the same model unpacked, when asked for);
bytes.json their bytes counted from the files.
"""

import logging
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tasks import card, models, packed, plans, progress, store
from tasks.errors import UserError
from tasks.job import Job, Record
from tasks.statistics import BlockStatistics
from windquant import blocks, checkpoint, embeddings
from windquant.evaluate import Scores, score
from windquant.grids import GRIDS
from windquant.layers import FEW
from windquant.quantize import PackedMatrix, quantize_matrix

log = logging.getLogger("windquant")


@dataclass(frozen=True)
class QuantizeConfig:
    """check_tokens: length of the text on which the reloaded checkpoint's logits must equal the quantized model's.
    card_windows: windows of the validation text for the perplexity on the checkpoint's card. export_dequantized: write
    the model unpacked as well, in bfloat16, for programs that do not know this format.
    """

    check_tokens: int = 128
    card_windows: int = 4
    export_dequantized: bool = False

    def __post_init__(self) -> None:
        if self.check_tokens <= FEW:
            raise ValueError(f"check_tokens {self.check_tokens} is not above {FEW}: so few tokens are rounded otherwise")
        if self.card_windows < 1:
            raise ValueError(f"card_windows {self.card_windows} is not at least 1")


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
    dense |= _add_rest(writer, walk, plan)
    writer.close(models.config(source).to_dict(), plan.header["chunk_size"])
    packed.copy_companions(source, out)
    shutil.copyfile(store.path("allocate") / f"{name}.parquet", out / "plan.parquet")
    count = checkpoint.count(out)
    if count.body != plan.size:
        raise AssertionError(f"{name}: the files hold {count.body} bytes of matrices, the plan said {plan.size}")
    loaded = packed.load(out, job.device)
    _compare_logits(loaded, source, dense, config, job)
    card.write(out, plan, count, _validation(loaded, config))
    if config.export_dequantized:
        packed.export_dense(out, out / "bf16")
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


def _add_rest(writer: checkpoint.Writer, walk: blocks.Walk, plan: plans.Plan) -> dict[str, torch.Tensor]:
    """Store all that is not of the body; returns it as it was stored, float32."""
    bits, dense = plan.header["embedding_bits"], {}
    tables = embeddings.matrices(walk.model) if bits else []
    for matrix in tables:
        key = f"{matrix.name}.weight"
        stored, dense[key] = embeddings.quantize(walk.source(lambda n, key=key: n == key)[key].float(), bits,
                                                 plan.header["chunk_size"])  # fmt: skip
        writer.add_matrix(matrix.name, stored, embedding=True)
    names = checkpoint.others(walk.model, tables)
    for other, tensor in walk.source(lambda n: n in names).items():
        half = checkpoint.store_other(other, tensor)
        writer.add(other, half)
        dense[other] = half.float()
    return dense


@torch.inference_mode()
def _compare_logits(
    loaded: torch.nn.Module, source: Path, dense: dict[str, torch.Tensor], config: QuantizeConfig, job: Job
) -> None:
    """The reloaded checkpoint's logits against those of the weights as they were before packing: equal, in float32."""
    windows = store.load_tensors(store.path("prepare") / "windows" / "validation.safetensors")["ids"]
    ids = windows[: 1 + FEW // windows.shape[1], : config.check_tokens].long().to(job.device)
    memory = models.skeleton(models.config(source))
    memory.load_state_dict({k: v.to(job.device) for k, v in dense.items()}, strict=False, assign=True)
    memory.tie_weights()
    expected = memory.eval().to(job.device)(input_ids=ids, use_cache=False).logits
    difference = (loaded(input_ids=ids, use_cache=False).logits - expected).abs().max()
    if not difference == 0:
        raise AssertionError(f"the reloaded logits differ from the quantized model's by {difference:g}")


def _validation(model: torch.nn.Module, config: QuantizeConfig) -> Scores:
    """On the windows' own tokens alone: windows that overlap are scored as if they did not."""
    ids = store.load_tensors(store.path("prepare") / "windows" / "validation.safetensors")["ids"][: config.card_windows]
    return score(model, ids.long(), ids.shape[1], report=progress.bar("perplexity for the card"))
