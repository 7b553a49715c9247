"""Stage 7: the chosen plan's checkpoint trained on, and written again in the same bytes.

Out: <plan>-trained/, a checkpoint folder like those of quantize; bytes.json, its bytes counted from the files. With
`steps: 0` bytes.json alone, and empty.
"""

import hashlib
import json
import logging
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tasks import card, models, packed, plans, progress, store
from tasks.expected import Expected
from tasks.job import Job, Record
from tasks.quantize import summary
from tasks.student import FinetuneConfig, build
from windquant import checkpoint, qat
from windquant.evaluate import Scores, score
from windquant.layers import unpacked

log = logging.getLogger("windquant")


def run(config: FinetuneConfig, job: Job) -> Record:
    name = store.load_json(store.path("allocate") / "summary.json")["chosen"]
    from tasks import processes, training  # late: Trainer drags much in, and params are read by every stage

    if not config.steps:
        log.info("no training is asked for (finetune.steps)")
        store.save_json(job.out / "bytes.json", {})
        return Record()
    source, out = store.path("quantize") / name, job.out / f"{name}{plans.TRAINED}"
    learner = build(source, config, job.device)
    model, quantization = learner.model, learner.model.hf_quantizer.quantization_config.quantization
    validation = _windows("validation")[: config.eval_windows]
    before = _score(model, config, job.device, "before")
    text = training.Text(_text(config, learner, job), validation)
    curves = processes.run(learner, source, text, config, job.common.seed, job.scratch.folder / name, job.device)
    model.eval()
    _as_stored_(model)
    after = _score(model, config, job.device, "after")
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
    from tasks import generate, processes, shared

    together = config.batch * config.accumulate * processes.how_many(config, job.device)
    wanted = config.windows or min(len(windows), (config.steps or 0) * together)
    report = progress.bar("generating text")
    kept = shared.Shared(job.device, [generate])
    return generate.windows(learner.reference, wanted, windows.shape[1], job.common.seed, kept, report)


def _others(model: Any) -> dict[str, torch.Tensor]:
    """What was trained beside the matrices."""
    own = qat.learned(model)
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad and id(p) not in own}


def _as_stored_(model: Any) -> None:
    """Matrices are rounded in every step, all else now. Raises InputError when it does not fit."""
    for name, p in _others(model).items():
        p.copy_(checkpoint.store_other(name, p))


def _windows(split: str) -> torch.Tensor:
    return store.load_tensors(store.path("prepare") / "windows" / f"{split}.safetensors")["ids"].long()


def _score(model: Any, config: FinetuneConfig, device: torch.device, when: str) -> Scores:
    expected = Expected("validation", config.eval_windows, device)
    report = progress.bar(f"validation text, {when} training")
    return score(model, expected.ids, expected.ids.shape[1], expected, report)


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
