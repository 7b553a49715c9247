"""What finetune trains: a checkpoint of ours with layers that round in every pass, and the reference beside it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks import models, packed, store
from tasks.config import by_effort
from tasks.errors import UserError
from windquant import qat
from windquant.errors import above_zero, between_0_and_1
from windquant.streams import compute_fast

LONG = 5000
"""Steps from which on codes are learned and WinQ's pull and noise are the default. Its authors take 240,000; no run of ours
was so long, and fixed codes have been measured to be better in runs of up to a few hundred."""


@dataclass(frozen=True)
class FinetuneConfig:
    """steps: of the optimizer; 0: no training. batch: windows a step, on every process; accumulate: so many of them before
    the weights move. processes: null: one for every GPU, or one; what they do is one run of `processes` times the batch.
    text: `train`, or `generated` by the reference itself, in the manner of LLM-QAT (arXiv 2305.17888). train: `matrices`,
    the quantized ones alone, `norms`, these and norms and biases, or `all`, with tables that are not packed; what is no
    quantized matrix is stored in 16 bits either way. codes: `learned`, as scales are, or `fixed`, so that scales alone are
    learned of the matrices, in a quarter of the memory; null: learned in runs of LONG steps and more and wherever WinQ is
    asked for, else fixed, for in short runs what changes codes undoes reconstruction (benchmarks/LOG.md). lr: of AdamW,
    without weight decay, after `warmup` of the steps falling along a cosine to 0; lr_scales: of the logarithms of scales;
    null: 1.5e-2 with fixed codes, else 2e-3, for a scale takes learned weights over the edges of their cells. lr_norms: of
    norms and biases. beta2: of AdamW. damping: of scales, norms and biases: what is added to the root of their second
    moment, in root mean squares of their gradients in the first step, so that what has small gradients, which are mostly
    noise, moves little; 0: AdamW as it is; null: 1 with fixed codes, else 0. distill: weight of the KL divergence from the
    reference beside the next-token loss, 0 to 1. alpha, pull_every: WinQ's pull, alpha 0 or every 0 steps for none; null:
    every quarter of a run of LONG steps and more, never in shorter ones, which it makes worse (benchmarks/LOG.md). hadamard:
    the pull is to the grid in a Hadamard basis. sigma: WinQ's noise, on weights and scales, 0 for none; null: the papers'
    1e-3, where there is a pull by default. save_every: steps between checkpoints to resume from. checkpointing: activations
    are computed again in the backward pass. windows: of the training text; null: all, of generated text what the steps take.
    eval_windows: of the validation text, on which the model is measured before, after, and every `eval_every` steps; null:
    ten times in all, 0: never. check_tokens: length of the text on which the reloaded checkpoint's logits must equal the
    trained model's."""

    steps: int | None = by_effort(demo=60, full=2000)
    batch: int = 2
    accumulate: int = 1
    processes: int | None = None
    text: Literal["train", "generated"] = "train"
    train: Literal["matrices", "norms", "all"] = "norms"
    codes: Literal["learned", "fixed"] | None = None
    lr: float = 3e-4
    lr_scales: float | None = None
    lr_norms: float = 3e-3
    damping: float | None = None
    warmup: float = 0.05
    beta2: float = 0.95
    distill: float = 1.0
    alpha: float = 0.4
    pull_every: int | None = None
    hadamard: bool = False
    sigma: float | None = None
    save_every: int = 25
    checkpointing: bool = False
    windows: int | None = None
    eval_windows: int = 4
    eval_every: int | None = None
    check_tokens: int = 128

    def __post_init__(self) -> None:
        above_zero(self, "batch", "accumulate", "lr", "lr_norms", "save_every", "eval_windows", "check_tokens")
        between_0_and_1(self, "distill", "alpha", "warmup", "beta2")
        for name in ("steps", "pull_every", "eval_every", "sigma", "damping"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} {getattr(self, name):g} is negative")
        above_zero(self, *(name for name in ("windows", "processes", "lr_scales") if getattr(self, name) is not None))
        if self.codes == "fixed" and (self._winq or self.hadamard):
            raise ValueError("codes 'fixed' leaves pull_every, sigma and hadamard nothing to do; leave these out, or set "
                             "codes to learned")  # fmt: skip

    @property
    def _winq(self) -> bool:
        """Whether WinQ is asked for by name."""
        return bool((self.alpha and self.pull_every) or self.sigma)

    @property
    def long(self) -> bool:
        return (self.steps or 0) >= LONG

    @property
    def fixed(self) -> bool:
        return self.codes == "fixed" or (self.codes is None and not (self.long or self._winq))

    @property
    def pull_steps(self) -> int:
        """Between two pulls; 0: none."""
        usual = (self.steps or 0) // 4 if self.long and not self.fixed else 0
        return usual if self.pull_every is None else self.pull_every

    @property
    def noise(self) -> float:
        usual = 1e-3 if self.long and not self.fixed else 0.0
        return usual if self.sigma is None else self.sigma

    @property
    def scales_rate(self) -> float:
        return (1.5e-2 if self.fixed else 2e-3) if self.lr_scales is None else self.lr_scales

    @property
    def damped(self) -> float:
        return float(self.fixed) if self.damping is None else self.damping


class Student(nn.Module):
    """A model with quantized layers, and the reference that it learns from: token ids (n, T) -> its loss, nats a token. Its
    state is what is trained and nothing else. reference: None where nothing is distilled."""

    def __init__(self, model: Any, reference: Any, config: FinetuneConfig) -> None:
        super().__init__()
        self.model, self.distill = model, config.distill
        self._reference = [reference]  # in a list: it is no part of what is trained
        own, matrices = qat.learned(model), {id(p) for m in qat.layers(model).values() for p in (m.w, m.log)}
        for p in model.parameters():
            other = config.train == "all" or (config.train == "norms" and p.dim() == 1)
            p.requires_grad_(id(p) in own if id(p) in matrices else other)

    @property
    def reference(self) -> Any:
        return self._reference[0]

    def groups(self, config: FinetuneConfig) -> list[dict[str, Any]]:
        """For the optimizer: weights and tables; scales; norms and biases."""
        scales = {id(layer.log) for layer in qat.layers(self.model).values()}
        trained = [p for p in self.parameters() if p.requires_grad]
        few = [p for p in trained if p.dim() == 1 and id(p) not in scales]
        many = [p for p in trained if p.dim() > 1 and id(p) not in scales]
        groups = [
            {"params": many, "lr": config.lr, "damping": 0.0},
            {"params": [p for p in trained if id(p) in scales], "lr": config.scales_rate, "damping": config.damped},
            {"params": few, "lr": config.lr_norms, "damping": config.damped},
        ]
        return [g for g in groups if g["params"]]

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logp = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        nll = F.nll_loss(logp.flatten(0, 1), input_ids[:, 1:].flatten())
        loss = (1 - self.distill) * nll
        if self.distill:
            with torch.no_grad():
                expected = self.reference(input_ids=input_ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
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


def build(source: Path, config: FinetuneConfig, device: torch.device) -> Student:
    """Of a checkpoint folder that quantize wrote: weights that are learned start as near to the reference's as the codes
    allow."""
    reference = models.reference(store.path("prepare") / "model", device)
    model = packed.load(source, device)
    for name, layer, matrix in list(packed.matrices(model)):
        like = reference.get_submodule(name).weight
        model.set_submodule(name, qat.QuantizedLinear(matrix, layer.bias, like, fixed=config.fixed))
    return Student(model, as_teacher(reference, device), config)


def as_teacher(reference: Any, device: torch.device) -> Any:
    """In place, in what the machine computes in: training would round its weights in every step."""
    return reference.bfloat16() if compute_fast(device) else reference
