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
from typing import Any, Literal

import torch

from tasks import card, models, packed, plans, progress, store
from tasks.config import by_effort
from tasks.job import Job, Record
from tasks.quantize import summary
from windquant import checkpoint, qat
from windquant.errors import above_zero, between_0_and_1
from windquant.evaluate import Scores, score
from windquant.layers import unpacked

log = logging.getLogger("windquant")


@dataclass(frozen=True)
class FinetuneConfig:
    """steps: of the optimizer; 0: no training. batch: windows a step, on every process; accumulate: so many of them before
    the weights move. processes: null: one for every GPU, or one; what they do is one run of `processes` times the batch.
    text: `train`, or `generated` by the reference itself, in the manner of LLM-QAT (arXiv 2305.17888). train: `matrices`,
    the quantized ones alone, `norms`, these and norms and biases, or `all`, with tables that are not packed; what is no
    quantized matrix is stored in 16 bits either way. lr: of AdamW, without weight decay, after `warmup` of the steps
    falling along a cosine to 0; lr_scales: of the logarithms of scales, of norms and biases. beta2: of AdamW. distill:
    weight of the KL divergence from the reference beside the next-token loss, 0 to 1. alpha, pull_every: WinQ's pull, alpha
    0 or every 0 steps for none; null: every quarter of the run. hadamard: the pull is to the grid in a Hadamard basis.
    sigma: WinQ's noise, on weights and scales, 0 for none. save_every: steps between checkpoints to resume from.
    checkpointing: activations are computed again in the backward pass. windows: of the training text; null: all, of
    generated text what the steps take. eval_windows: of the validation text, on which the model is measured before, after,
    and every `eval_every` steps; null: ten times in all, 0: never. check_tokens: length of the text on which the reloaded
    checkpoint's logits must equal the trained model's."""

    steps: int | None = by_effort(demo=0, full=2000)
    batch: int = 2
    accumulate: int = 1
    processes: int | None = None
    text: Literal["train", "generated"] = "train"
    train: Literal["matrices", "norms", "all"] = "norms"
    lr: float = 3e-4
    lr_scales: float = 2e-3
    warmup: float = 0.05
    beta2: float = 0.95
    distill: float = 1.0
    alpha: float = 0.4
    pull_every: int | None = None
    hadamard: bool = False
    sigma: float = 1e-3
    save_every: int = 25
    checkpointing: bool = False
    windows: int | None = None
    eval_windows: int = 4
    eval_every: int | None = None
    check_tokens: int = 128

    def __post_init__(self) -> None:
        above_zero(self, "batch", "accumulate", "lr", "lr_scales", "save_every", "eval_windows", "check_tokens")
        between_0_and_1(self, "distill", "alpha", "warmup", "beta2")
        for name in ("steps", "pull_every", "eval_every", "sigma"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} {getattr(self, name):g} is negative")
        above_zero(self, *(name for name in ("windows", "processes") if getattr(self, name) is not None))


def run(config: FinetuneConfig, job: Job) -> Record:
    name = store.load_json(store.path("allocate") / "summary.json")["chosen"]
    from tasks import processes, student, training  # late: Trainer drags much in, and params are read by every stage

    if not config.steps:
        log.info("no training is asked for (finetune.steps)")
        store.save_json(job.out / "bytes.json", {})
        return Record()
    source, out = store.path("quantize") / name, job.out / f"{name}-winq"
    learner = student.build(source, config, job.device)
    model, quantization = learner.model, learner.model.hf_quantizer.quantization_config.quantization
    validation = _windows("validation")[: config.eval_windows]
    before = _score(model, validation, job.device, "before")
    text = training.Text(_text(config, learner, job), validation)
    curves = processes.run(learner, source, text, config, job.common.seed, job.scratch.folder / name, job.device)
    model.eval()
    _as_stored_(model)
    after = _score(model, validation, job.device, "after")
    _write(model, quantization, source, out, config, job)
    count = checkpoint.count(out)
    plan = plans.load_plan(source / "plan.parquet")
    if count.body != plan.size:
        raise AssertionError(f"{name}: the files hold {count.body} bytes of matrices, the plan said {plan.size}")
    _compare(model, out, validation[:1, : config.check_tokens], job.device)
    card.write(out, plan, count, f"that of quantize, then {config.steps} steps of training", after, "finetune")
    store.save_json(job.out / "bytes.json", {out.name: summary(count)})
    log.info("%s: %.4f effective bits; validation text: %.3f nats before, %.3f after; KL %.3f, %.3f",
             out.name, count.effective_bits, before.nll, after.nll, before.kl, after.kl)  # fmt: skip
    metrics = {"nll_before": before.nll, "nll_after": after.nll, "kl_before": before.kl or 0.0, "kl_after": after.kl or 0.0}
    return Record(metrics=metrics | {"effective_bits": count.effective_bits}, curves=curves, tags={"method": out.name},
                  files=[job.out / "bytes.json"])  # fmt: skip


def _text(config: FinetuneConfig, learner: Any, job: Job) -> torch.Tensor:
    """What is trained on, (n, T)."""
    windows = _windows("train")
    if config.text == "train":
        return windows[: config.windows]
    from tasks import generate

    wanted = config.windows or min(len(windows), (config.steps or 0) * config.batch * config.accumulate)
    report = progress.bar("generating text")
    return generate.windows(learner.reference, wanted, windows.shape[1], job.common.seed, job.scratch, report)


def _others(model: Any) -> dict[str, torch.Tensor]:
    """What was trained beside the matrices."""
    own = {id(p) for layer in qat.layers(model).values() for p in (layer.w, layer.log)}
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad and id(p) not in own}


def _as_stored_(model: Any) -> None:
    """Matrices are rounded in every step, all else now. Raises InputError when it does not fit."""
    for name, p in _others(model).items():
        p.copy_(checkpoint.store_other(name, p))


def _windows(split: str) -> torch.Tensor:
    return store.load_tensors(store.path("prepare") / "windows" / f"{split}.safetensors")["ids"].long()


def _score(model: Any, ids: torch.Tensor, device: torch.device, when: str) -> Scores:
    reference = models.reference(store.path("prepare") / "model", device)
    return score(model, ids, ids.shape[1], reference, progress.bar(f"validation text, {when} training"))


def _write(model: Any, quantization: checkpoint.Quantization, source: Path, out: Path, config: Any, job: Job) -> None:
    """The trained matrices, and all else as it lies in the checkpoint that training began from."""
    made = json.dumps([quantization.made_from, asdict(config), job.common.seed], sort_keys=True)
    writer = checkpoint.Writer(out, replace(quantization, made_from=hashlib.sha256(made.encode()).hexdigest()))
    trained = qat.layers(model)
    own = {f"{name}.{part}" for name in trained for part in checkpoint.STORED_AS}
    for name, layer in trained.items():
        writer.add_matrix(name, layer.packed())
    others = _others(model)
    for name, tensor in models.weight_source(source)(lambda n: n not in own).items():
        writer.add(name, checkpoint.store_other(name, others[name]) if name in others else tensor)
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
