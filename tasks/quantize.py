"""Stage 6: every plan applied, packed into a checkpoint, loaded back and compared.

Out: <plan>/ a checkpoint folder a plan, with its card README.md (and bf16/, the same model unpacked, when asked for);
bytes.json their bytes counted from the files.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from tasks import card, models, packed, plans, progress, store
from tasks.config import by_effort
from tasks.errors import UserError
from tasks.job import Job, Record
from tasks.statistics import BlockStatistics, Protector
from windquant import blocks, checkpoint, embeddings
from windquant.blocks import WeightSource
from windquant.calibrate import Report
from windquant.engine import Engine
from windquant.errors import about
from windquant.evaluate import Scores, score
from windquant.layers import unpacked
from windquant.quantize import PackedMatrix, quantize_matrix
from windquant.reconstruct import ReconstructConfig
from windquant.units import columns_of

log = logging.getLogger("windquant")


@dataclass(frozen=True)
class QuantizeConfig:
    """treatment: `rounding` to nearest, `feedback` (GPTQ's error feedback, minutes), or `reconstruction` of every block's
    output (the best; longest). steps, batch, rate: of reconstruction, see `windquant.reconstruct`; batch is in windows of
    the calibration text. check_tokens: length of the text on which the reloaded checkpoint's logits must equal the
    quantized model's. card_windows: windows of the validation text for the perplexity on the checkpoint's card.
    export_dequantized: write the model unpacked as well, in bfloat16, for programs that do not know this format.
    """

    treatment: Literal["rounding", "feedback", "reconstruction"] = "reconstruction"
    steps: int | None = by_effort(demo=50, full=200)
    batch: int = 4
    rate: float | None = None
    check_tokens: int = 128
    card_windows: int = 4
    export_dequantized: bool = False

    def __post_init__(self) -> None:
        _ = self.reconstruct
        for name in ("check_tokens", "card_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not at least 1")

    @property
    def reconstruct(self) -> ReconstructConfig | None:
        config = ReconstructConfig(self.steps or 1, self.batch, self.rate)
        return config if self.treatment == "reconstruction" else None


def run(config: QuantizeConfig, job: Job) -> Record:
    source = store.path("prepare") / "model"
    record, counts = Record(), {}
    for file in sorted(store.path("allocate").glob("*.parquet")):
        plan = plans.load_plan(file)
        if config.treatment == "reconstruction" and plan.header["allocator"] in ("ppo", "evolution"):
            log.warning("plan %s was searched for another treatment; after reconstruction lagrangian's have been better "
                        "(benchmarks/LOG.md), which `compare` will tell", file.stem)  # fmt: skip
        with job.scratch.clock(file.stem) as clock:
            counts[file.stem] = _quantize(source, plan, job.out / file.stem, config, job)
        record.extra.setdefault("seconds", {})[file.stem] = clock.seconds
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
    name, chunk = out.name, plan.header["chunk_size"]
    walk = models.walk(source, job.device)
    model_hash = store.load_json(store.path("prepare") / "manifest.json")["model_hash"]
    if plan.header["model_hash"] != model_hash or not walk.fits([u.matrix for u in plan.body]):
        raise UserError(f"plan {name} is for another model than artifacts/prepare/model; run `dvc repro allocate`")
    protector = Protector(plan.protection)
    engine = Engine(walk, plan.of, chunk, config.reconstruct, job.common.seed, job.scratch, name, log.warning, protector)
    report = progress.bar(f"{config.treatment} of {name}")
    rounding = config.treatment == "rounding"
    made = _rounding(engine, report) if rounding else engine.run(_windows("calibration"), report)
    made_from = json.dumps([model_hash, plan.header, asdict(config), job.common.seed], sort_keys=True)
    quantization = _quantization(plan, walk, hashlib.sha256(made_from.encode()).hexdigest())
    writer = checkpoint.Writer(out, quantization, checkpoint.shard_bytes(walk.model))
    for block in made:
        for matrix, stored in block.items():
            writer.add_matrix(matrix, stored)
    rest = _add_rest(writer, walk, plan)
    writer.close(models.config(source).to_dict())
    packed.copy_companions(source, out)
    shutil.copyfile(store.path("allocate") / f"{name}.parquet", out / "plan.parquet")
    count = checkpoint.count(out)
    if count.body != plan.size:
        raise AssertionError(f"{name}: the files hold {count.body} bytes of matrices, the plan said {plan.size}")
    loaded = packed.load(out, job.device)
    _compare_logits(loaded, models.walk(source, job.device, _stored(engine, rest)), config)
    card.write(out, plan, count, config.treatment, _validation(loaded, config))
    if config.export_dequantized:
        packed.export_dense(out, out / "bf16")
    log.info("%s: %.4f effective bits, %.1f MB, reloaded with equal logits", name, count.effective_bits, count.model / 1e6)
    return count


def _quantization(plan: plans.Plan, walk: blocks.Walk, made_from: str) -> checkpoint.Quantization:
    header, chunk = plan.header, plan.header["chunk_size"]
    bits: int = header["embedding_bits"] or 0
    if bits not in (0, *embeddings.BITS):
        rule = f"which is not one of {embeddings.BITS}"
        raise UserError(f"the plan has embedding_bits {bits}, {rule}; run `dvc repro allocate`")
    body = {u.matrix.name: checkpoint.entry(u.matrix, plan.of(u.matrix.name)) for u in plan.body}
    tables = embeddings.matrices(walk.model) if bits else []
    packed = {m.name: checkpoint.entry(m, [bits] * len(columns_of(m.columns, chunk))) for m in tables}
    return checkpoint.Quantization(chunk, body, packed, header["salient"], header["salient_share"], made_from)


def _windows(split: str) -> torch.Tensor:
    return store.load_tensors(store.path("prepare") / "windows" / f"{split}.safetensors")["ids"].long()


def _rounding(engine: Engine, report: Report) -> Iterator[dict[str, PackedMatrix]]:
    """Every matrix by itself, with the reference's moments: no streams."""
    walk = engine.walk
    for i in range(len(walk)):
        if not engine.has(i):
            statistics, made = BlockStatistics(i), {}
            with walk.block(i) as block:
                for name, linear in blocks.linears(block).items():
                    full = walk.path(i, name)
                    H = statistics.moment(name).to(walk.device)
                    with about(full):
                        salient = engine.protect(i, name, linear.weight)
                        made[full] = quantize_matrix(linear.weight, H, engine.plan(full), engine.chunk_size, salient)[0]
            engine.keep(i, made)
        yield engine.kept(i)
        report(i + 1, len(walk))


def _add_rest(writer: checkpoint.Writer, walk: blocks.Walk, plan: plans.Plan) -> dict[str, torch.Tensor]:
    """Store all that is not of the body; returns it as it was stored, float32."""
    bits, dense = plan.header["embedding_bits"], {}
    walk.model.tie_weights()  # pyright: ignore[reportCallIssue]  # a walk gives its parameters back one by one, untied
    tables = embeddings.matrices(walk.model) if bits else []
    for matrix in tables:
        key = f"{matrix.name}.weight"
        stored, dense[key] = embeddings.quantize(walk.source(lambda n, key=key: n == key)[key].float(), bits,
                                                 plan.header["chunk_size"])  # fmt: skip
        writer.add_matrix(matrix.name, stored)
    names = checkpoint.others(walk.model, tables)
    for name in names:  # one by one
        for other, tensor in walk.source(lambda n, name=name: n == name).items():
            half = checkpoint.store_other(other, tensor)
            writer.add(other, half)
            dense[other] = half.float()
    return dense


def _stored(engine: Engine, rest: dict[str, torch.Tensor]) -> WeightSource:
    """The weights as they were packed, from what the engine keeps, and what is stored beside them."""
    block_of = {f"{m.name}.weight": m.block for m in blocks.matrices(engine.walk.model)}

    def read(wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
        found = {name: t for name, t in rest.items() if wanted(name)}
        for i in dict.fromkeys(block for name, block in block_of.items() if wanted(name)):
            found |= {f"{m}.weight": p.dequantize() for m, p in engine.kept(i).items()}
        return found

    return read


@torch.inference_mode()
def _compare_logits(loaded: torch.nn.Module, packed: blocks.Walk, config: QuantizeConfig) -> None:
    """The reloaded checkpoint's logits against those of the weights as they were packed: equal, in float32."""
    ids = _windows("validation")[:1, : config.check_tokens].to(packed.device)
    hidden = packed.embed(ids)
    for i in range(len(packed)):
        with packed.block(i) as block:
            hidden = packed.run(i, block, hidden.to(packed.device))
    with packed.head() as head:
        expected = head(hidden)
    with unpacked(loaded):
        difference = (loaded(input_ids=ids, use_cache=False).logits - expected).abs().max()
    if not difference == 0:
        raise AssertionError(f"the reloaded logits differ from the quantized model's by {difference:g}")


def _validation(model: torch.nn.Module, config: QuantizeConfig) -> Scores:
    """On the windows' own tokens alone: windows that overlap are scored as if they did not."""
    ids = _windows("validation")[: config.card_windows]
    return score(model, ids, ids.shape[1], report=progress.bar("perplexity for the card"))
