"""Stage 7: the chosen plan's checkpoint trained on, and written again in the same bytes.

Out: <plan>-winq/, a checkpoint folder like those of quantize; bytes.json, its bytes counted from the files. With `steps: 0`
bytes.json alone, and empty.
"""

import hashlib
import json
import logging
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tasks import card, models, packed, plans, progress, store
from tasks.config import by_effort
from tasks.job import Job, Record
from tasks.quantize import summary
from windquant import checkpoint, qat
from windquant.engine import compute_fast
from windquant.errors import above_zero, between_0_and_1
from windquant.evaluate import Scores, score
from windquant.layers import PackedLinear, unpacked
from windquant.quantize import PackedMatrix

log = logging.getLogger("windquant")


@dataclass(frozen=True)
class FinetuneConfig:
    """steps: of the optimizer; 0: no training. batch: windows a step, on every process; accumulate: so many of them before
    the weights move. lr: of AdamW, without weight decay, after `warmup` of the steps falling along a cosine to 0. distill:
    weight of the KL divergence from the reference beside the next-token loss, 0 to 1. alpha, pull_every: WinQ's pull, alpha
    0 or every 0 steps for none; null: every quarter of the run. sigma: WinQ's noise, on weights and scales, 0 for none.
    save_every: steps between checkpoints to resume from. checkpointing: activations are computed again in the backward pass.
    windows: of the training text; null: all. eval_windows: of the validation text, on which the model is measured before and
    after. check_tokens: length of the text on which the reloaded checkpoint's logits must equal the trained model's."""

    steps: int | None = by_effort(demo=0, full=2000)
    batch: int = 2
    accumulate: int = 1
    lr: float = 5e-5
    warmup: float = 0.05
    distill: float = 1.0
    alpha: float = 0.4
    pull_every: int | None = None
    sigma: float = 1e-3
    save_every: int = 25
    checkpointing: bool = False
    windows: int | None = None
    eval_windows: int = 4
    check_tokens: int = 128

    def __post_init__(self) -> None:
        above_zero(self, "batch", "accumulate", "lr", "save_every", "eval_windows", "check_tokens")
        between_0_and_1(self, "distill", "alpha", "warmup")
        for name in ("steps", "pull_every", "sigma"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} {getattr(self, name):g} is negative")
        if self.windows is not None:
            above_zero(self, "windows")


def run(config: FinetuneConfig, job: Job) -> Record:
    name = store.load_json(store.path("allocate") / "summary.json")["chosen"]
    from tasks.training import Student, train  # late: Trainer drags much in, and params are read by every stage

    if not config.steps:
        log.info("no training is asked for (finetune.steps)")
        store.save_json(job.out / "bytes.json", {})
        return Record()
    source, out = store.path("quantize") / name, job.out / f"{name}-winq"
    reference = models.reference(store.path("prepare") / "model", job.device)
    model = packed.load(source, job.device)
    quantization = model.hf_quantizer.quantization_config.quantization
    _replace_layers(model, quantization, reference)
    ids = _windows("validation")[: config.eval_windows]
    before = _score(model, ids, reference, "before")
    teacher = reference.bfloat16() if compute_fast(job.device) else reference
    student = Student(model, teacher, config.distill)
    curves = train(student, _windows("train")[: config.windows], config, job.common.seed, job.scratch.folder / name,
                   job.device, progress.bar(f"training {name}"))  # fmt: skip
    model.eval()
    after = _score(model, ids, models.reference(store.path("prepare") / "model", job.device), "after")
    _write(model, quantization, source, out, config, job)
    count = checkpoint.count(out)
    plan = plans.load_plan(source / "plan.parquet")
    if count.body != plan.size:
        raise AssertionError(f"{name}: the files hold {count.body} bytes of matrices, the plan said {plan.size}")
    _compare(model, out, ids[:1, : config.check_tokens], job.device)
    card.write(out, plan, count, f"that of quantize, then {config.steps} steps of training", after, "finetune")
    store.save_json(job.out / "bytes.json", {out.name: summary(count)})
    log.info("%s: %.4f effective bits; validation text: %.3f nats before, %.3f after; KL %.3f, %.3f",
             out.name, count.effective_bits, before.nll, after.nll, before.kl, after.kl)  # fmt: skip
    metrics = {"nll_before": before.nll, "nll_after": after.nll, "kl_before": before.kl or 0.0, "kl_after": after.kl or 0.0}
    return Record(metrics=metrics | {"effective_bits": count.effective_bits}, curves=curves, tags={"method": out.name},
                  files=[job.out / "bytes.json"])  # fmt: skip


def _windows(split: str) -> torch.Tensor:
    return store.load_tensors(store.path("prepare") / "windows" / f"{split}.safetensors")["ids"].long()


def _replace_layers(model: Any, quantization: checkpoint.Quantization, reference: Any) -> None:
    """Layers to train in the place of packed ones, as near to the reference's as the checkpoint's codes allow."""
    for name, (rows, columns, symbols) in quantization.plan.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, PackedLinear)
        matrix = PackedMatrix(rows, columns, quantization.chunk_size, symbols, layer.codes, layer.scale, layer.span,
                              layer.salient)  # fmt: skip
        model.set_submodule(name, qat.QuantizedLinear(matrix, layer.bias, reference.get_submodule(name).weight))


def _score(model: Any, ids: torch.Tensor, reference: Any, when: str) -> Scores:
    return score(model, ids, ids.shape[1], reference, progress.bar(f"validation text, {when} training"))


def _write(model: Any, quantization: checkpoint.Quantization, source: Path, out: Path, config: Any, job: Job) -> None:
    """The trained matrices, and all else as it lies in the checkpoint that training began from."""
    made = json.dumps([quantization.made_from, asdict(config), job.common.seed], sort_keys=True)
    writer = checkpoint.Writer(out, replace(quantization, made_from=hashlib.sha256(made.encode()).hexdigest()))
    trained = qat.layers(model)
    own = {f"{name}.{part}" for name in trained for part in checkpoint.STORED_AS}
    for name, layer in trained.items():
        writer.add_matrix(name, layer.packed())
    for name, tensor in models.weight_source(source)(lambda n: n not in own).items():
        writer.add(name, tensor)
    said = json.loads((source / "config.json").read_text())
    writer.close({key: value for key, value in said.items() if key != "quantization_config"})
    packed.copy_companions(source, out)
    shutil.copyfile(source / "plan.parquet", out / "plan.parquet")


@torch.inference_mode()
def _compare(model: Any, out: Path, ids: torch.Tensor, device: torch.device) -> None:
    loaded = packed.load(out, device)
    expected = model(input_ids=ids.to(device), use_cache=False).logits
    with unpacked(loaded):
        difference = (loaded(input_ids=ids.to(device), use_cache=False).logits - expected).abs().max()
    if not difference == 0:
        raise AssertionError(f"the reloaded logits differ from the trained model's by {difference:g}")
