"""The loop of quantization-aware training: Hugging Face's Trainer, with WinQ's pull as a callback.

What Trainer brings along: gradient accumulation, bfloat16, schedules, several processes (see `processes`), checkpoints and
resuming from them, which keep weights, scales, optimizer, schedule and random numbers, so that an interrupted run goes on
alike.
"""

import ctypes
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from tasks import interrupts
from tasks.errors import UserError
from tasks.student import FinetuneConfig, Student
from windquant import qat
from windquant.calibrate import Report
from windquant.streams import compute_fast

STATE, PARTS = "trainer_state.json", ("model.safetensors", "optimizer.pt", "scheduler.pt")
"""Of a checkpoint of Trainer's."""
VALIDATION = "validation_nll"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h: from how many bytes on memory goes back to the kernel."""


class Text(NamedTuple):
    """Token ids (n, T)."""

    train: Tensor
    validation: Tensor


class _Loop(Trainer):
    """Stops at once when the loss is no number."""

    groups: list[dict[str, Any]]

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            betas = self.args.adam_beta1, self.args.adam_beta2
            self.optimizer = torch.optim.AdamW(self.groups, betas=betas, eps=self.args.adam_epsilon, weight_decay=0.0)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        out = model(**inputs)
        if not math.isfinite(float(out["loss"].detach())):
            _stop("loss", float(out["loss"]), self.state.global_step, Path(str(self.args.output_dir)))
        return (out["loss"], out) if return_outputs else out["loss"]


class _Steps(TrainerCallback):
    """What is done beside the optimizer's steps: damping before the first one; the pull to the grid and the loss of
    validation text, before a checkpoint is saved; progress."""

    def __init__(self, config: FinetuneConfig, validation: Tensor, report: Report) -> None:
        self.config, self.validation, self.report = config, validation, report
        steps = config.steps or 0
        self.every = config.pull_steps
        self.eval_every = max(1, steps // 10) if config.eval_every is None else config.eval_every

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Before weights, and with the next checkpoint what can be gone back to, are lost."""
        total = sum(float(p.grad.sum()) for p in model.parameters() if p.grad is not None)
        if not math.isfinite(total):
            _stop("gradient", total, state.global_step, Path(args.output_dir))
        if state.global_step == 0:
            for group in optimizer.param_groups:
                _damp(group)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.every and self.config.alpha and state.global_step % self.every == 0:
            qat.pull_to_grid_(model, self.config.alpha, self.config.hadamard)
        if self.eval_every and (state.global_step % self.eval_every == 0 or state.global_step == state.max_steps):
            state.log_history.append(
                {"step": state.global_step, VALIDATION: _nll(model, self.validation, self.config.batch)}
            )
        self.report(state.global_step, state.max_steps)
        interrupts.check()


def _damp(group: dict[str, Any]) -> None:
    """By AdamW's eps, which checkpoints keep with the rest of the group."""
    gradients = [p.grad for p in group["params"] if p.grad is not None]
    total = sum(float(g.square().sum(dtype=torch.float64)) for g in gradients)
    if group["damping"] and total:
        learning = sum(int(g.count_nonzero()) for g in gradients)  # not rows of zeros, nor units at 16 bits
        group["eps"] = max(group["eps"], group["damping"] * math.sqrt(total / learning))


@torch.no_grad()
def _nll(student: Any, windows: Tensor, size: int) -> float:
    """Nats a token, without noise."""
    student.eval()
    device = next(student.parameters()).device
    nll = [float(student(input_ids=rows.to(device))["nll"]) * len(rows) for rows in windows.split(size)]
    student.train()
    return sum(nll) / len(windows)


def _stop(what: str, value: float, step: int, folder: Path) -> None:
    """Raises UserError."""
    kept = last(folder)
    where = f"the last good checkpoint is {kept}" if kept else "no checkpoint was saved before"
    raise UserError(
        f"the {what} is {value:g} in step {step + 1}; {where}, from which the same parameters go on; or lower "
        f"finetune.lr, lr_scales and lr_norms or sigma, and training begins again"
    )


def _keep_freed_memory() -> None:
    """glibc would give large tensors back to the kernel and get them zeroed anew in every step: a fifth of its time,
    for a fifth less memory (benchmarks/LOG.md)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, 2**31 - 1)


def last(folder: Path, processes: int | None = None) -> str | None:
    """The newest whole checkpoint; those that an interruption left in pieces are deleted. processes: that wrote them, each
    its own random numbers; None: as many as torchrun started."""
    processes = processes or int(os.environ.get("WORLD_SIZE", "1"))
    parts = [*PARTS, *([f"rng_state_{i}.pth" for i in range(processes)] if processes > 1 else ["rng_state.pth"])]
    found = sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]), reverse=True)
    for checkpoint in found:
        try:
            json.loads((checkpoint / STATE).read_text())  # written last, by the first process
            if all((checkpoint / part).exists() for part in parts):
                return str(checkpoint)
        except (OSError, ValueError):
            pass
        shutil.rmtree(checkpoint)
    return None


def train(
    student: Student, text: Text, config: FinetuneConfig, seed: int, folder: Path, device: torch.device, report: Report
) -> dict[str, list[float]]:  # fmt: skip
    """Train in place; returns curves, step by step, that of the validation text NaN where it was not measured. folder:
    checkpoints that an interrupted run goes on from. Raises UserError when the loss turns NaN or Inf."""
    if device.type == "cpu":
        _keep_freed_memory()
    for layer in qat.layers(student).values():
        layer.sigma = config.noise
    if config.hadamard and config.alpha and config.pull_steps:
        for width in {w for layer in qat.layers(student).values() for w in layer.latent.widths}:
            qat.hadamard(width)  # raises now what it would in the first pull
    if config.checkpointing:
        student.model.activation_checkpointing_enable()
    steps = config.steps or 0
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=config.batch,
        gradient_accumulation_steps=config.accumulate,
        learning_rate=config.lr,
        lr_scheduler_type="cosine",
        warmup_steps=math.ceil(config.warmup * steps),
        adam_beta2=config.beta2,
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
        ddp_find_unused_parameters=any(".experts" in name for name, _ in student.named_modules()),  # called or not
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # not DataParallel, which copies layers from device to device
    rows = [{"input_ids": row, "labels": row} for row in text.train]
    loop = _Loop(student, arguments, train_dataset=rows, callbacks=[_Steps(config, text.validation, report)])  # pyright: ignore[reportArgumentType]
    loop.groups = student.groups(config)
    loop.remove_callback(PrinterCallback)
    checkpoint, end = last(folder), folder / f"checkpoint-{steps}"
    if checkpoint == str(end):  # all is done, and Trainer would go on for one step more
        student.load_state_dict(load_file(end / "model.safetensors"))
        history = json.loads((end / STATE).read_text())["log_history"]
    else:
        loop.train(resume_from_checkpoint=checkpoint)
        history = loop.state.log_history
    measured = {row["step"]: row[VALIDATION] for row in history if VALIDATION in row}
    return {
        **{name: [float(row[name]) for row in history if "loss" in row] for name in ("loss", "grad_norm", "learning_rate")},
        VALIDATION: [measured.get(step, math.nan) for step in range(1, steps + 1)],
    }
