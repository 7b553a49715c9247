"""The card of a checkpoint: README.md in its folder, what it is and what it cost, for whoever finds it alone.

A card is part of artifacts/quantize, the same bytes for the same inputs. What differs from run to run (the MLflow run, the
hours) is therefore not in it: the card names the file that holds it. The benchmark runs later and has its own results;
the perplexity here is of validation text.
"""

from pathlib import Path

from tasks import plans, store
from windquant.checkpoint import Bytes
from windquant.evaluate import Scores

TEMPLATE = """\
---
{hub}library_name: transformers
tags: [windquant]
---

# {method} at {bits:.4f} effective bits

{base} quantized by windquant. Load it with

    import windquant  # before from_pretrained, or transformers would warn and fill the model with random weights
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("<this folder>")

| | |
|---|---|
| base model | `{model}`, weights sha256 {model_hash} |
| text | `{text}`, sha256 {text_hash} |
| plan | allocator {allocator}, target {target:.6g} effective bits, chunks of {chunk} columns, seed {seed} (`plan.parquet`) |
| treatment | {treatment} |
| share of the weights | {shares} |
| salient weights | {salient} |
| embeddings and head | {embedding} bits |
| effective bits | {bits:.4f} of the quantized matrices, {bits_model:.4f} of the whole file |
| perplexity | {perplexity:.2f} a token, on the first {tokens} tokens of the validation text (not the benchmark's) |
| made by | `python -m tasks {stage}`, a stage of `python -m flows.run` |
| MLflow run | `mlflow_run` in the project's `artifacts/runs/{stage}.json` |

## Bytes

{bytes}
"""


def write(folder: Path, plan: plans.Plan, count: Bytes, treatment: str, scores: Scores, stage: str = "quantize") -> None:
    """README.md of a checkpoint. scores: of the reloaded checkpoint on validation text."""
    manifest, header = store.load_json(store.path("prepare") / "manifest.json"), plan.header
    parts = ("codes", "scales", "salient", "plan", "embeddings", "head", "other", "header")
    rows = [f"| {name} | {getattr(count, name):,} |" for name in parts]
    total = f"| all | {count.model:,} |"
    note = f"Of the codes {count.padding:,} bytes are padding. The plan, one byte a unit, lies in config.json."
    values = {
        "method": folder.name,
        "base": Path(manifest["model"].split("#")[0]).name,
        "model": manifest["model"],
        "hub": _hub(manifest["model"]),
        "model_hash": manifest["model_hash"][:16],
        "text": manifest["text"],
        "text_hash": manifest["text_hash"][:16],
        "allocator": header["allocator"],
        "target": header["target_bits"],
        "chunk": header["chunk_size"],
        "seed": header["seed"],
        "treatment": treatment,
        "stage": stage,
        "shares": ", ".join(f"{100 * s:.1f} % at {w:g} bits" for w, s in plan.shares().items() if s),
        "salient": f"{header['salient_share']:.2%} of the {header['salient']} in INT8" if plan.protection else "none",
        "embedding": header["embedding_bits"] or 16,
        "bits": count.effective_bits,
        "bits_model": count.effective_bits_model,
        "perplexity": scores.perplexity,
        "tokens": scores.tokens,
        "bytes": "\n".join(["| part | bytes |", "|---|---|", *rows, total, "", note]),
    }
    (folder / "README.md").write_text(TEMPLATE.format(**values))


def _hub(model: str) -> str:
    """The card's line that names the base model, of models that the hub has."""
    kind, _, name = model.partition(":")
    return f'base_model: "{name.partition("@")[0]}"\n' if kind == "hf" else ""
