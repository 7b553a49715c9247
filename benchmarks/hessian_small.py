"""Spectra along quantization-aware training, of a LLaMA small enough to be trained here.

Four blocks of hidden size 64 on the 1,023 commonest tokens of the training articles (all others are one), pretrained, then
trained at each width from the pretrained weights rounded to nearest: straight through, next-token loss, 64-column units, no
noise. `small` is trained without pulls, its Hessian that at Q(W) as training sees it, on the way; `small, pulls` with WinQ's
pulls, at the end. `small, after a pull` is one pull more at the end of `small`, seen the same way; `small, latent` and
`small, latent pulled` are the Hessians of the loss at W itself before and after that pull.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.hessian_rows import Kept, Row, compared
from tasks import models, progress, store
from tasks.diagnose import latent_weights
from windquant import blocks, qat
from windquant.quantize import quantize_matrix
from windquant.units import columns_of

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024}  # fmt: skip
WIDTHS, LOOKS, BATCH, TOKENS, CHUNK = (4, 2, 1), (0, 50, 300), 16, 128, 64
PRETRAINING, RATE, QAT_RATE, ALPHA, PULL_EVERY = 600, 3e-3, 1e-3, 0.4, 75
Look = Callable[[int], None]


def text() -> tuple[Tensor, Tensor]:
    """Training windows and validation windows, (n, TOKENS), in the small vocabulary."""
    parts = []
    for split in ("train", "validation"):
        ids = store.load_tensors(store.path("prepare") / "windows" / f"{split}.safetensors")["ids"].long()
        parts.append(ids[:, : ids.shape[1] // TOKENS * TOKENS].reshape(-1, TOKENS))
    found, counts = parts[0].unique(return_counts=True)
    common = found[counts.argsort(descending=True, stable=True)[: SIZES["vocab_size"] - 1]]
    place = torch.zeros(int(max(p.max() for p in parts)) + 1, dtype=torch.long)
    place[common] = torch.arange(1, len(common) + 1)
    return place[parts[0]], place[parts[1]]


def learn(model: Any, windows: Tensor, steps: int, rate: float, label: str, look: Look = lambda done: None) -> None:
    """AdamW on next tokens, all that requires a gradient; look: called with the steps done, 0 first."""
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / 20) * 0.5 * (1 + math.cos(math.pi * i / steps))
    )
    generator, report = torch.Generator().manual_seed(0), progress.bar(label)
    look(0)
    for i in range(steps):
        ids = windows[torch.randint(len(windows), (BATCH,), generator=generator)]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        look(i + 1)
        report(i + 1, steps)


def pretrained(kept: Kept, windows: Tensor) -> Any:
    config = models.config(store.path("prepare") / "model")
    for name, value in SIZES.items():
        setattr(config, name, value)
    model = models.skeleton(config)
    generator = torch.Generator().manual_seed(0)
    start = {
        n: torch.ones(p.shape) if p.ndim == 1 else torch.empty(p.shape).normal_(0, 0.02, generator=generator)
        for n, p in model.named_parameters()
    }
    trained = kept.scratch.get("small") if kept.scratch.has("small") else None
    model.load_state_dict(trained or start, strict=False, assign=True)
    model.tie_weights()
    if trained is None:
        learn(model.requires_grad_(True), windows, PRETRAINING, RATE, "pretraining the small model")
        kept.scratch.put("small", {n: p.detach() for n, p in model.named_parameters()})
    return model.eval().requires_grad_(False)


def quantized(reference: Any, bits: float, chunk: int = CHUNK) -> Any:
    """A copy whose matrices are rounded to nearest at one width, to be trained; all else stays."""
    model = copy.deepcopy(reference)
    for m in blocks.matrices(reference):
        w = reference.get_submodule(m.name).weight.detach()
        packed, _ = quantize_matrix(w, torch.eye(m.columns), [bits] * len(columns_of(m.columns, chunk)), chunk)
        model.set_submodule(m.name, qat.QuantizedLinear(packed, like=w, inside=0.49))
    return model


def dense(reference: Any, student: Any, weight: Callable[[qat.QuantizedLinear], Tensor]) -> Any:
    model = copy.deepcopy(reference)
    with torch.no_grad():
        for name, layer in qat.layers(student).items():
            model.get_submodule(name).weight.copy_(weight(layer))
    return model


def inside(reference: Any, student: Any) -> list[Tensor]:
    """Of the middle block's matrices: 1 where a weight has a gradient, (rows, columns), by the layers' own backward pass."""
    prefix, found = blocks.decoder_blocks(reference)
    out = []
    for layer in qat.layers(student.get_submodule(f"{prefix}.{len(found) // 2}")).values():
        probe = layer(torch.ones(1, layer.in_features)).sum()
        reached = torch.autograd.grad(probe, layer.w)[0]
        out.append(reached.transpose(0, 1).flatten(1)[:, : layer.in_features])
    return out


def rows(kept: Kept) -> list[Row]:
    train, validation = text()
    reference, ids, out = pretrained(kept, train), validation[:BATCH], []

    def look(name: str, bits: float, step: int, model: Callable[[], Any], seen: list[Tensor] | None = None) -> None:
        found, loss = kept.spectrum(f"{name} {bits:g} {step}", model, ids, seen)
        flat = kept.made["small 16 0"][0].flat()
        out.append({"model": name, "bits": bits, "step": step, "nll": loss} | found.figures(flat))

    look("small", 16, 0, lambda: reference)
    for bits in WIDTHS:
        for name, pulls in (("small", False), ("small, pulls", True)):
            _trained(reference, bits, name, pulls, train, look)
    return out


def _trained(reference: Any, bits: float, name: str, pulls: bool, train: Tensor, look: Callable[..., None]) -> None:
    student = quantized(reference, bits)

    def at(step: int) -> None:
        if pulls and step and step % PULL_EVERY == 0 and step < LOOKS[-1]:
            qat.pull_to_grid_(student, ALPHA)
        if step in (LOOKS[-1:] if pulls else LOOKS):
            look(name, bits, step, lambda: dense(reference, student, lambda m: m.weight), inside(reference, student))

    learn(student, train, LOOKS[-1], QAT_RATE, f"{name}, {bits:g} bits", at)
    if pulls:
        return
    last = LOOKS[-1]
    look("small, latent", bits, last, lambda: dense(reference, student, latent_weights))
    qat.pull_to_grid_(student, ALPHA)
    look("small, latent pulled", bits, last, lambda: dense(reference, student, latent_weights))
    look(
        "small, after a pull", bits, last, lambda: dense(reference, student, lambda m: m.weight), inside(reference, student)
    )


def claims(rows: list[Row]) -> list[str]:
    by, last, said = {(r["model"], r["bits"], r["step"]): r for r in rows}, LOOKS[-1], []
    for step in (0, last):
        four, one = by["small", 4, step], by["small", 1, step]
        said.append(compared(f"small, step {step}: magnitudes are larger at 4 bits than at 1", one, four))
        said.append(compared(f"small, step {step}: the mean square is larger at 4 bits than at 1", one, four, "rms"))
        said.append(compared(f"small, step {step}: more is near zero at 1 bit than at 4", four, one, "near_zero"))
    for bits in WIDTHS:
        name, early, end = f"small, bits {bits}", by["small", bits, LOOKS[1]], by["small", bits, last]
        latent, pulled = by["small, latent", bits, last], by["small, latent pulled", bits, last]
        pulls = by["small, pulls", bits, last]
        said += [
            compared(f"{name}: more is near zero at step {last} than at {LOOKS[1]}", early, end, "near_zero"),
            compared(f"{name}: a pull raises magnitudes as training sees them", end, by["small, after a pull", bits, last]),
            compared(f"{name}: a pull raises magnitudes at the latent weights", latent, pulled),
            compared(f"{name}: training with pulls ends at larger magnitudes", end, pulls),
            compared(
                f"{name}: training with pulls ends with less near zero", by["small, pulls", bits, last], end, "near_zero"
            ),
        ]
    return said
