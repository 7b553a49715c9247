"""The loop of quantization-aware training: Hugging Face's Trainer, with WinQ's pull as a callback.

What Trainer brings along: gradient accumulation, bfloat16, schedules, checkpoints and resuming from them, which keep
weights, scales, optimizer, schedule and random numbers, so that an interrupted run goes on alike. One process, one device:
several have not been tried.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from tasks import interrupts
from tasks.errors import UserError
from tasks.finetune import FinetuneConfig
from windquant import qat
from windquant.calibrate import Report
from windquant.engine import compute_fast

STATE, PARTS = "trainer_state.json", ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")
"""Of a checkpoint of Trainer's."""


class Student(nn.Module):
    """A model with quantized layers, and the reference that it learns from: token ids (n, T) -> its loss, nats a token. Its
    state is what is trained and nothing else."""

    def __init__(self, model: Any, reference: Any, distill: float) -> None:
        super().__init__()
        self.model, self.distill = model, distill
        self._reference = [reference]  # in a list: it is no part of what is trained
        trained = {id(p) for layer in qat.layers(model).values() for p in (layer.w, layer.s)}
        for p in model.parameters():
            p.requires_grad_(id(p) in trained)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logp = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        nll = F.nll_loss(logp.flatten(0, 1), input_ids[:, 1:].flatten())
        loss = (1 - self.distill) * nll
        if self.distill:
            reference = self._reference[0].to(input_ids.device)
            with torch.no_grad():
                expected = reference(input_ids=input_ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
            loss = loss + self.distill * F.kl_div(logp, expected, reduction="sum", log_target=True) / logp[..., 0].numel()
        return {"loss": loss, "nll": nll.detach()}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        names = {name for name, p in self.named_parameters() if p.requires_grad}
        return {name: t for name, t in super().state_dict(*args, **kwargs).items() if name in names}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        names = {name for name, p in self.named_parameters() if p.requires_grad}
        if names != state_dict.keys():
            raise UserError("a checkpoint of the training is of another plan; delete .state/finetune")
        found = super().load_state_dict(state_dict, strict=False, assign=assign)
        return type(found)([], found.unexpected_keys)  # what is not trained is not missing


class _Loop(Trainer):
    """Stops at once when the loss is no number."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        out = model(**inputs)
        if not math.isfinite(float(out["loss"].detach())):
            _stop("loss", float(out["loss"]), self.state.global_step, Path(str(self.args.output_dir)))
        return (out["loss"], out) if return_outputs else out["loss"]


class _Pull(TrainerCallback):
    """The pull to the grid, before a checkpoint is saved; progress."""

    def __init__(self, config: FinetuneConfig, every: int, report: Report) -> None:
        self.config, self.every, self.report = config, every, report

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Before weights, and with the next checkpoint what can be gone back to, are lost."""
        total = sum(float(p.grad.sum()) for p in model.parameters() if p.grad is not None)
        if not math.isfinite(total):
            _stop("gradient", total, state.global_step, Path(args.output_dir))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.every and self.config.alpha and state.global_step % self.every == 0:
            qat.pull_to_grid_(model, self.config.alpha)
        self.report(state.global_step, state.max_steps)
        interrupts.check()


def _stop(what: str, value: float, step: int, folder: Path) -> None:
    """Raises UserError."""
    kept = _last(folder)
    where = f"the last good checkpoint is {kept}" if kept else "no checkpoint was saved before"
    raise UserError(
        f"the {what} is {value:g} in step {step + 1}; {where}, from which the same parameters go on; or lower "
        f"finetune.lr or finetune.sigma, and training begins again"
    )


def _last(folder: Path) -> str | None:
    """The newest whole checkpoint; those that an interruption left in pieces are deleted."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]), reverse=True)
    for checkpoint in found:
        try:
            json.loads((checkpoint / STATE).read_text())  # written last
            if all((checkpoint / name).exists() for name in PARTS):
                return str(checkpoint)
        except (OSError, ValueError):
            pass
        shutil.rmtree(checkpoint)
    return None


def train(
    student: Student, windows: Tensor, config: FinetuneConfig, seed: int, folder: Path, device: torch.device, report: Report
) -> dict[str, list[float]]:  # fmt: skip
    """Train in place; returns curves, step by step. windows: token ids (n, T). folder: checkpoints to resume from, which
    an interrupted run goes on from. Raises UserError when the loss turns NaN or Inf."""
    for layer in qat.layers(student).values():
        layer.sigma = config.sigma
    if config.checkpointing:
        student.model.gradient_checkpointing_enable()
    steps = config.steps or 0
    every = max(1, steps // 4) if config.pull_every is None else config.pull_every
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=config.batch,
        gradient_accumulation_steps=config.accumulate,
        learning_rate=config.lr,
        lr_scheduler_type="cosine",
        warmup_steps=math.ceil(config.warmup * steps),
        weight_decay=0.0,
        bf16=compute_fast(device),
        use_cpu=device.type == "cpu",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=config.save_every,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        seed=seed,
        data_seed=seed,
        remove_unused_columns=False,
        dataloader_pin_memory=device.type != "cpu",
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # not DataParallel, which copies layers from device to device
    rows = [{"input_ids": row, "labels": row} for row in windows]
    loop = _Loop(student, arguments, train_dataset=rows, callbacks=[_Pull(config, every, report)])  # pyright: ignore[reportArgumentType]
    loop.remove_callback(PrinterCallback)
    loop.train(resume_from_checkpoint=_last(folder))
    history = [row for row in loop.state.log_history if "loss" in row]
    return {name: [float(row[name]) for row in history] for name in ("loss", "grad_norm", "learning_rate")}
