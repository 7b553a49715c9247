"""WinQ against plain quantization-aware training: same start, data, schedule and steps.

A small LLaMA is pretrained on the training articles with a tokenizer of its own, then trained on at one width everywhere,
one scale a row of a unit: `plain` (ParetoQ), `pull` and `noise` alone, `winq` both. `speedup`: plain's steps over those in
which a variant's validation loss first was not above plain's final one. Pretraining and finished rows survive a kill.
"""

import hashlib
import logging
import math
import shutil
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.hessian_small import quantized
from tasks import progress, store
from tasks.settings import load as load_params
from tasks.student import FinetuneConfig, Student
from windquant import qat

log = logging.getLogger("windquant")
VOCABULARY, WINDOW, BATCH, CHUNK = 2048, 128, 4, 256
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 4,
         "num_key_value_heads": 4, "max_position_embeddings": WINDOW, "vocab_size": VOCABULARY}  # fmt: skip
WIDTHS = (2, 1)


@dataclass(frozen=True)
class Variant:
    """pulls: in a run, evenly apart, the last one at its end."""

    alpha: float = 0.4
    sigma: float = 1e-3
    pulls: int = 4


PLAIN = Variant(alpha=0.0, sigma=0.0)
WINQ = Variant()
VARIANTS = {"plain": PLAIN, "pull": replace(WINQ, sigma=0.0), "noise": replace(WINQ, alpha=0.0), "winq": WINQ}
STEPS = {"demo": (3000, 800), "full": (100_000, 40_000)}
"""Of pretraining, of training on."""
PRETRAINING_LR, LR = 1e-3, 3e-4
VALIDATION_WINDOWS, EVALUATIONS, ROUNDS = 64, 40, 10
END = "<|endoftext|>"


def run(seeds: int) -> tuple[list[dict[str, Any]], list[str]]:
    bench = Bench()
    shown = rows_of(bench, VARIANTS, seeds)
    return shown, [*notes(shown, VARIANTS, bench.reference), *_step_times(bench)]


def rows_of(bench: "Bench", variants: dict[str, Variant], seeds: int) -> list[dict[str, Any]]:
    """variants: `plain` among them."""
    cases = [(seed, bits, name) for seed in range(seeds) for bits in WIDTHS for name in variants]
    rows: list[dict[str, Any]] = [{"variant": name} | bench.row(bits, variants[name], seed) for seed, bits, name in cases]
    for row in rows:
        plain = next(r for r in rows if (r["bits"], r["variant"], r["seed"]) == (row["bits"], "plain", row["seed"]))
        reached = [step for step, nll in row["curve"] if nll <= plain["final_loss"]]
        row["speedup"] = bench.steps / reached[0] if reached else 0.0
    return [{k: v for k, v in r.items() if k != "curve"} for r in rows]


def notes(rows: list[dict[str, Any]], variants: Iterable[str], reference: float) -> list[str]:
    said = [f"the pretrained model: {reference:.4f} nats a token of validation text"]
    for bits in WIDTHS:
        for variant in variants:
            own = [r for r in rows if (r["bits"], r["variant"]) == (bits, variant)]
            loss, speedup = ([r[c] for r in own] for c in ("final_loss", "speedup"))
            reached = f"plain's final loss in 1/{min(speedup):.2f} to 1/{max(speedup):.2f} of the steps" if min(speedup) \
                else f"plain's final loss reached by {sum(v > 0 for v in speedup)} of {len(own)}"  # fmt: skip
            said.append(
                f"{bits} bits, {variant}: {sum(loss) / len(loss):.4f} nats ({min(loss):.4f} to {max(loss):.4f}), {reached}"
            )
    return said


class Bench:
    """The pretrained model, its text, and rows that survive a kill while what they are made with stays the same."""

    def __init__(self) -> None:
        effort = load_params().common.effort
        self.pretraining, self.steps = STEPS[effort]
        made_of = [
            store.hash_tree(store.path("prepare") / "text"),
            VOCABULARY,
            WINDOW,
            BATCH,
            SHAPE,
            self.pretraining,
            PRETRAINING_LR,
        ]
        self.kept = store.Scratch("benchmark-winq", hashlib.sha256(repr(made_of).encode()).hexdigest())
        code = ("tasks/training.py", "tasks/student.py", "windquant/qat.py", "windquant/reconstruct.py")
        self.code = [store.hash_file(store.Path(f)) for f in code]
        self.train, self.validation = self._windows()
        if not self.kept.has("pretrained"):
            self.kept.put("pretrained", _pretrained(self.train, self.pretraining))
        self.reference = _nll(self.model(), self.validation)
        log.info("pretrained: %.4f nats a token of validation text", self.reference)

    def _windows(self) -> tuple[Tensor, Tensor]:
        texts = [store.load_table(store.path("prepare") / "text" / f"{split}.parquet")[0]["text"]
                 for split in ("train", "validation")]  # fmt: skip
        tokenizer = _tokenizer(texts[0])
        ids = [torch.tensor([i for t in text for i in tokenizer.encode(t + END).ids]) for text in texts]
        train, validation = (t[: len(t) // WINDOW * WINDOW].view(-1, WINDOW) for t in ids)
        return train, validation[:: max(1, len(validation) // VALIDATION_WINDOWS)][:VALIDATION_WINDOWS]

    def model(self) -> Any:
        model = _untrained()
        model.load_state_dict(self.kept.get("pretrained"))
        return model

    def row(self, bits: int, variant: Variant, seed: int) -> dict[str, Any]:
        save_every, eval_every = max(1, self.steps // 4), max(1, self.steps // EVALUATIONS)
        config = FinetuneConfig(steps=self.steps, batch=BATCH, train="all", codes="learned", lr=LR, lr_scales=1e-3,
                                lr_norms=1e-3, damping=0.0, distill=0.0, alpha=variant.alpha, sigma=variant.sigma,
                                pull_every=self.steps // variant.pulls, save_every=save_every,
                                eval_every=eval_every)  # fmt: skip
        made_of = hashlib.sha256(repr([bits, config, seed, self.code]).encode()).hexdigest()
        key = f"{bits}-{seed}-{made_of[:12]}"
        if not self.kept.has_json(key):
            curve = self._curve(bits, config, seed, key)
            self.kept.put_json(key, {"bits": bits, "seed": seed, "final_loss": curve[-1][1], "curve": curve})
            log.info("%d bits, %s, seed %d: %.4f nats", bits, variant, seed, curve[-1][1])
        return self.kept.get_json(key)

    def _curve(self, bits: int, config: FinetuneConfig, seed: int, name: str) -> list[tuple[int, float]]:
        """Steps and validation losses."""
        from tasks.training import VALIDATION, Text, train

        model = self.quantized(bits)
        folder = self.kept.folder / name
        text, report = Text(self.train, self.validation), progress.bar(f"{bits} bits, {name}")
        found = train(Student(model, None, config), text, config, seed, folder, torch.device("cpu"), report)
        shutil.rmtree(folder)
        return [(step, nll) for step, nll in enumerate(found[VALIDATION], 1) if math.isfinite(nll)]

    def quantized(self, bits: int) -> Any:
        return quantized(self.model(), bits, CHUNK)


def _step_times(bench: Bench) -> list[str]:
    """Processor seconds of a step, side by side and in turn: the first half of the rounds warms up."""
    ids = bench.train[:BATCH]
    models = {"unquantized": bench.model()} | {f"{bits} bits": bench.quantized(bits) for bits in WIDTHS}
    steppers = {name: _stepper(model.train().requires_grad_(True), ids) for name, model in models.items()}
    noisy = bench.quantized(WIDTHS[0]).train().requires_grad_(True)
    for layer in qat.layers(noisy).values():
        layer.sigma = WINQ.sigma
    steppers[f"{WIDTHS[0]} bits with noise"] = _stepper(noisy, ids)
    spent = {name: [] for name in steppers}
    for _ in range(2 * ROUNDS):
        for name, step in steppers.items():
            began = time.process_time()
            step()
            spent[name].append(time.process_time() - began)
    median = {name: statistics.median(values[ROUNDS:]) for name, values in spent.items()}
    return [f"a step at {name}: {m / median['unquantized']:.2f}x an unquantized one" for name, m in list(median.items())[1:]]


def _stepper(model: Any, ids: Tensor) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=letters, show_progress=False)
    made.train_from_iterator(texts, trainer)
    return made


def _untrained() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))


def _pretrained(windows: Tensor, steps: int) -> dict[str, Tensor]:
    """The state of a model trained from scratch."""
    model, report = _untrained().train(), progress.bar("pretraining")
    optimizer = torch.optim.AdamW(model.parameters(), PRETRAINING_LR, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PRETRAINING_LR, steps, pct_start=0.05)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        ids = windows[torch.randint(len(windows), (BATCH,), generator=generator)]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        report(step + 1, steps)
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


@torch.inference_mode()
def _nll(model: Any, windows: Tensor) -> float:
    model.eval()
    return sum(float(model(input_ids=row[None], labels=row[None]).loss) for row in windows) / len(windows)
