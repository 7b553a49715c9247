"""Peak memory and seconds of the engine against the size of the model, phase by phase, on random weights.

LLaMA shapes of 0.1, 0.3 and 1 B parameters are written to a temporary folder, a block a shard, and each goes through the
engine (reconstruction) and the checkpoint writer in a process of its own (`benchmarks.scale_run`): the same tokens, steps,
widths and chunks for every size. `peak_gib` is the resident set's high water over what the process held before it touched
the model, mapped pages of the weights and of the streams included: nothing is left out that one could argue about, and
the kernel keeps count, no samples are taken. What must not be exceeded is `bound_gib`: three times the largest block plus
the embeddings, both in float32 as they are held.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.scale_run import BATCH, CHUNK, STEPS, TOKENS, WINDOWS
from tasks import progress, store

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A LLaMA: widths of the stream, of the MLP, of the keys, blocks, vocabulary; tied: one table for both ends."""

    name: str
    hidden: int
    inner: int
    layers: int
    keys: int
    vocabulary: int
    tied: bool = True

    @property
    def largest(self) -> int:
        """Weights of the largest matrix."""
        return self.hidden * self.inner

    @property
    def block(self) -> int:
        return 2 * self.hidden * (self.hidden + self.keys) + 3 * self.largest + 2 * self.hidden

    @property
    def body(self) -> int:
        """Weights that are quantized, near enough: the norms' are counted, too."""
        return self.layers * self.block

    @property
    def embeddings(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.body + self.embeddings + self.hidden

    @property
    def bound(self) -> int:
        """Bytes that the peak must stay within."""
        return 4 * (3 * self.block + self.embeddings)

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": self.hidden,
            "intermediate_size": self.inner, "num_hidden_layers": self.layers, "num_attention_heads": self.hidden // 64,
            "num_key_value_heads": self.keys // 64, "vocab_size": self.vocabulary, "tie_word_embeddings": self.tied,
        }  # fmt: skip


WARM = Shape("warm", 256, 512, 2, 128, 512)
MEASURED = (
    Shape("0.1 B", 768, 2048, 12, 768, 32000),
    Shape("0.3 B", 1024, 4096, 20, 512, 32000),
    Shape("1 B", 2048, 8192, 16, 512, 32000),
)
LARGER = (
    Shape("8 B", 4096, 14336, 32, 1024, 128256, tied=False),
    Shape("70 B", 8192, 28672, 80, 1024, 128256, tied=False),
)


def run(seeds: int) -> tuple[list[dict[str, Any]], list[str]]:
    rows: list[dict[str, Any]] = []
    totals: list[tuple[Shape, float]] = []
    report = progress.bar("models through the engine")
    for i, shape in enumerate(MEASURED):
        for seed in range(seeds):
            found = _measure(shape, seed)
            rows += _rows(shape, seed, found)
            totals.append((shape, sum(found["seconds"].values())))
        report(i + 1, len(MEASURED))
    return rows, _notes(rows, totals)


def _measure(shape: Shape, seed: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        for made in (WARM, shape):
            make(made, Path(folder) / made.name, torch.Generator().manual_seed(seed))
        command = [sys.executable, "-m", "benchmarks.scale_run", folder, WARM.name, shape.name]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def make(shape: Shape, folder: Path, generator: torch.Generator) -> None:
    """A checkpoint of random weights in bfloat16, a block a shard; one block is in memory at a time."""
    store.save_json(folder / "config.json", shape.config())

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    one, h = torch.ones(shape.hidden, dtype=torch.bfloat16), shape.hidden
    where: dict[str, str] = {}
    for i in range(shape.layers + 1):
        if i == shape.layers:
            tensors = {"model.embed_tokens.weight": matrix(shape.vocabulary, h), "model.norm.weight": one}
        else:
            sizes = {"self_attn.q_proj": (h, h), "self_attn.k_proj": (shape.keys, h), "self_attn.v_proj": (shape.keys, h),
                     "self_attn.o_proj": (h, h), "mlp.gate_proj": (shape.inner, h), "mlp.up_proj": (shape.inner, h),
                     "mlp.down_proj": (h, shape.inner)}  # fmt: skip
            tensors = {f"model.layers.{i}.{name}.weight": matrix(*size) for name, size in sizes.items()}
            tensors |= {f"model.layers.{i}.{name}_layernorm.weight": one.clone() for name in ("input", "post_attention")}
        where |= dict.fromkeys(tensors, f"shard-{i}.safetensors")
        save_file(tensors, folder / f"shard-{i}.safetensors", {"format": "pt"})
    store.save_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})


def _rows(shape: Shape, seed: int, found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    millions, peaks = shape.parameters / 1e6, found["peak"]

    def row(phase: str, seconds: float, peak: float) -> dict[str, Any]:
        return {"parameters": shape.parameters, "seed": seed, "phase": phase, "seconds": seconds,
                "seconds_per_million": seconds / millions, "peak_gib": peak / GIB}  # fmt: skip

    rows = [row(phase, s, peaks[phase]) for phase, s in found["seconds"].items()]
    whole = row("all", sum(found["seconds"].values()), max(peaks.values()))
    held = {"block_gib": 4 * shape.block / GIB, "embeddings_gib": 4 * shape.embeddings / GIB, "bound_gib": shape.bound / GIB}
    predicted = {"formula_gib": max(formula(shape).values()) / GIB}
    return [*rows, whole | held | predicted | {"ratio": whole["peak_gib"] / held["bound_gib"]}]


FORMULA = """\
    embed 4 E + 2 E   the embeddings, and the pages of their file
    fit   4 B + 4 S + 4 M + P + K   the block, its moments, a latent beside its matrix
    steps 4 B + 2 B + 6 M + P + K   latents, bfloat16 weights (4 B where the CPU has no bfloat16), a gradient
    pack  4 B + 13 M + K  the block again, a matrix as codes and, at most, three times as weights
E, B, M: weights of the embeddings, a block, its largest matrix; S: squared widths of its four inputs; P = 32 max(2^19, rows
of a unit x its columns): eight float32 pieces; K = max(B, 32 MB): the shard being filled. Beside it activations, 12 bytes x
hidden x tokens of calibration for the streams, and the graph of a step's windows in one block"""


def formula(shape: Shape) -> dict[str, int]:
    """Phase -> bytes at its peak: FORMULA."""
    B, E, M, S = shape.block, shape.embeddings, shape.largest, 3 * shape.hidden**2 + shape.inner**2
    P, K = 32 * max(1 << 19, shape.inner * CHUNK), min(max(B, 32_000_000), 9 * shape.layers * B // 32)
    return {"embed": 6 * E, "fit": 4 * (B + S + M) + P + K, "steps": 6 * (B + M) + P + K, "pack": 4 * B + 13 * M + K}


def _power(points: list[tuple[float, float]]) -> float:
    """The slope of a line through the logarithms of (x, y)."""
    x, y = torch.tensor(points, dtype=torch.float64).log().unbind(1)
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def _notes(rows: list[dict[str, Any]], totals: list[tuple[Shape, float]]) -> list[str]:
    notes = [
        f"{WINDOWS} windows of {TOKENS} tokens, {STEPS} steps of {BATCH} windows, {CHUNK}-column units of 2 and 3 bits, "
        f"{torch.get_num_threads()} threads"
    ]
    every, body = (_power([(getattr(shape, n), t) for shape, t in totals]) for n in ("parameters", "body"))
    notes.append(f"seconds grow as parameters to the power of {every:.3f}, as quantized weights to {body:.3f} (1: linearly)")
    notes.append(f"peak bytes, the largest of\n{FORMULA}")
    for shape in (*MEASURED, *LARGER):
        phases = formula(shape)
        peak, phase = max(phases.values()), max(phases, key=lambda name: phases[name])
        blocks = max(n for name, n in phases.items() if name != "embed")
        notes.append(
            f"{shape.name}: block {4 * shape.block / GIB:.3f} GiB, embeddings {4 * shape.embeddings / GIB:.3f}, bound "
            f"{shape.bound / GIB:.3f}; by the formula {peak / GIB:.3f} ({phase}), {peak / shape.bound:.2f} of it; without "
            f"the embeddings {blocks / GIB:.3f}, {blocks / 4 / shape.block:.2f} blocks"
        )
    return notes
