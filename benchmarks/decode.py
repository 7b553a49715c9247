"""Tokens a second of the packed checkpoints beside the dense reference, both in bfloat16, in turns in one process.

Prefill is one pass over PROMPT tokens, decode DECODED tokens one by one behind it. Every model runs once a round; ratios are
medians of the rounds' own ratios, so that what else the machine does in the meantime falls on both sides.
"""

import gc
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from tasks import models, packed, progress, store

PROMPT, DECODED, ROUNDS = 512, 16, 5
CPU, DTYPE = torch.device("cpu"), torch.bfloat16


def run(seeds: int) -> tuple[list[dict[str, Any]], list[str]]:
    folders = {"reference": store.path("prepare") / "model"}
    folders |= {p.name: p for p in sorted(store.path("quantize").iterdir()) if p.is_dir()}
    loaded, memory = {}, {}
    for name, folder in folders.items():
        before = _resident()
        loaded[name] = (models.load if name == "reference" else packed.load)(folder, CPU, DTYPE)
        memory[name] = _resident() - before
    ids = store.load_tensors(store.path("prepare") / "windows" / "test.safetensors")["ids"].flatten()[None, :PROMPT].long()
    report = progress.bar("prefill and decode in turns")
    rounds: list[dict[str, tuple[float, float]]] = []
    for i in range(ROUNDS + 1):
        rounds.append({name: _seconds(model, ids) for name, model in loaded.items()})
        report(i + 1, ROUNDS + 1)
    rows = [_row(name, rounds[1:], memory[name], folders[name]) for name in folders]  # the first round warms up
    worst = min(r["decode_ratio"] for r in rows)
    threads = torch.get_num_threads()
    return rows, [
        f"bfloat16, {threads} threads, {ids.shape[1]} tokens prefilled, {DECODED} decoded, medians of {ROUNDS} rounds; "
        f"memory_mb is what loading adds to the process; slowest decode: {worst:.2f} of the reference"
    ]


def _resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


@torch.inference_mode()
def _seconds(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Seconds of a prefill, and of a decoded token."""
    began = time.perf_counter()
    out = model(input_ids=ids, use_cache=True)
    prefilled = time.perf_counter()
    for _ in range(DECODED):
        out = model(input_ids=out.logits[:, -1:].argmax(-1), cache=out.past_key_values, use_cache=True)
    return prefilled - began, (time.perf_counter() - prefilled) / DECODED


def _row(name: str, rounds: list[dict[str, tuple[float, float]]], memory: int, folder: Path) -> dict[str, Any]:
    prefill, decode = ([r[name][k] for r in rounds] for k in (0, 1))
    ratios = [median(r["reference"][k] / r[name][k] for r in rounds) for k in (0, 1)]
    return {
        "method": name,
        "prefill_tokens_per_second": PROMPT / median(prefill),
        "decode_tokens_per_second": 1 / median(decode),
        "prefill_ratio": ratios[0],
        "decode_ratio": ratios[1],
        "memory_mb": memory / 1e6,
        "file_mb": sum(f.stat().st_size for f in set(models.shards(folder).values())) / 1e6,
    }
