"""Stage 9: reference and every checkpoint, benchmarked alike.

Out: results.json, a row a model; completions.json, greedy continuations side by side.
"""

import importlib.metadata
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks import harness, models, packed, progress, store
from tasks.config import by_effort
from tasks.job import Job, Record
from windquant.evaluate import score

log = logging.getLogger("windquant")


@dataclass(frozen=True)
class BenchmarkConfig:
    """tasks: lm-eval tasks; None takes last_word (made from the test articles) and all whose data lie in data_dir.
    data_dir: folder with <task>.jsonl (stock tasks on local data) or <task>.yaml (your own). windows: perplexity windows
    of the test text, 0 for all. limit: examples a task, 0 for all. few_shot: examples in the prompt. batch_size: of
    lm-eval. completions: prompts for the greedy continuations, of completion_tokens tokens.
    """

    tasks: tuple[str, ...] | None = None
    data_dir: str = "data/tasks"
    windows: int | None = by_effort(demo=16, full=0)
    limit: int | None = by_effort(demo=150, full=0)
    few_shot: int = 0
    batch_size: int = 8
    completions: int = 4
    completion_tokens: int = 32

    def __post_init__(self) -> None:
        for name in ("windows", "limit", "few_shot", "completions"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is negative")
        if self.batch_size < 1 or self.completion_tokens < 1:
            raise ValueError("batch_size and completion_tokens must be at least 1")
        if self.tasks is not None and not self.tasks:
            raise ValueError("tasks is an empty list; leave the key out for the default tasks")


def run(config: BenchmarkConfig, job: Job) -> Record:
    prepared = store.path("prepare")
    made = [p for stage in ("quantize", "finetune") for p in sorted(store.path(stage).iterdir()) if p.is_dir()]
    manifest = store.load_json(prepared / "manifest.json")
    names = list(config.tasks or ["last_word", *harness.available(Path(config.data_dir))])
    reference = models.reference(prepared / "model", job.device)
    record = Record(params=_facts(config, manifest, names))
    rows = []
    for method, folder in [("reference", prepared / "model"), *((p.name, p) for p in made)]:
        if not job.scratch.has_json(method):
            model = reference if method == "reference" else packed.load(folder, job.device)
            job.scratch.put_json(method, _benchmark(method, model, reference, config, manifest, names))
            del model
        found = job.scratch.get_json(method)
        rows.append({"method": method} | found)
        log.info("%s: perplexity %.2f, mean accuracy %.3f", method, found["perplexity"], found["acc_mean"])
        metrics = {k: v for k, v in found.items() if isinstance(v, float) and math.isfinite(v)}
        record.children[method] = Record(metrics=metrics, params=record.params, tags={"method": method})
    columns = {"prompt": rows[0]["prompts"]} | {r["method"]: r["completions"] for r in rows}
    record.tables["completions"] = columns
    store.save_json(job.out / "completions.json", columns)
    results = [{k: v for k, v in r.items() if k not in ("prompts", "completions")} for r in rows]
    store.save_json(job.out / "results.json", {"facts": record.params, "rows": results})
    return record


def _facts(config: BenchmarkConfig, manifest: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {
        "tasks": ",".join(names),
        "few_shot": config.few_shot,
        "limit": config.limit,
        "bos": manifest["bos"],
        "perplexity_window": manifest["windows"]["test"][1],
        "perplexity_stride": manifest["eval_stride"],
        "perplexity_windows": min(config.windows or 10**9, manifest["windows"]["test"][0]),
        "lm_eval": importlib.metadata.version("lm_eval"),
    }


def _benchmark(
    method: str, model: Any, reference: Any, config: BenchmarkConfig, manifest: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    prepared = store.path("prepare")
    ids = store.load_tensors(prepared / "windows" / "test.safetensors")["ids"][: config.windows or None].long()
    other = None if method == "reference" else reference
    scores = score(model, ids, manifest["eval_stride"], other, progress.bar(f"perplexity of {method}"))
    tokenizer = models.tokenizer(prepared / "model")
    articles, _ = store.load_table(prepared / "text" / "test.parquet")
    log.info("%s: perplexity %.2f over %d tokens; lm-eval on %s", method, scores.perplexity, scores.tokens, ", ".join(names))
    accuracy = harness.evaluate(
        model, tokenizer, names, data_dir=Path(config.data_dir), articles=articles["text"], bos=manifest["bos"],
        limit=config.limit or 0, batch_size=config.batch_size, few_shot=config.few_shot,
        max_length=manifest["windows"]["test"][1],
    )  # fmt: skip
    plain = [v for k, v in accuracy.items() if k.startswith("acc/")]
    prompts = [" ".join(t.split()[:24]) for t in articles["text"][: config.completions]]
    return {
        "perplexity": scores.perplexity,
        "nll": scores.nll,
        "kl_to_reference": scores.kl or 0.0,
        "acc_mean": sum(plain) / len(plain) if plain else 0.0,
        **accuracy,
        "prompts": prompts,
        "completions": _complete(model, tokenizer, prompts, config.completion_tokens, manifest["bos"]),
    }


@torch.inference_mode()
def _complete(model: Any, tokenizer: Any, prompts: list[str], tokens: int, bos: bool) -> list[str]:
    out = []
    for prompt in prompts:
        start = [tokenizer.bos_token_id] * bos
        ids = torch.tensor([start + tokenizer(prompt, add_special_tokens=False).input_ids], device=model.device)
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                              pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id)  # fmt: skip
        out.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    return out
