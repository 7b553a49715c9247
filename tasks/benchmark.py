"""Stage 9: reference and every checkpoint, benchmarked alike.

Out: results.json, a row a model; completions.json, greedy continuations side by side.
"""

import logging
import math
from typing import Any

import torch

from tasks import measure, models, packed, store
from tasks.job import Job, Record
from tasks.measure import BenchmarkConfig

log = logging.getLogger("windquant")


def run(config: BenchmarkConfig, job: Job) -> Record:
    prepared = store.path("prepare")
    made = [p for stage in ("quantize", "finetune") for p in sorted(store.path(stage).iterdir()) if p.is_dir()]
    manifest = store.load_json(prepared / "manifest.json")
    names = measure.tasks_of(config)
    reference = measure.expected(config, job.device)
    record = Record(params=measure.facts(config, manifest, names))
    rows = []
    for method, folder in [(measure.REFERENCE, prepared / "model"), *((p.name, p) for p in made)]:
        if not job.scratch.has_json(method):
            model = reference.model if method == measure.REFERENCE else packed.load(folder, job.device)
            found = measure.measure(method, model, reference, config, manifest)
            job.scratch.put_json(method, found | _continuations(model, config, manifest))
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


def _continuations(model: Any, config: BenchmarkConfig, manifest: dict[str, Any]) -> dict[str, Any]:
    prepared = store.path("prepare")
    articles, _ = store.load_table(prepared / "text" / "test.parquet")
    prompts = [" ".join(t.split()[:24]) for t in articles["text"][: config.completions]]
    tokenizer = models.tokenizer(prepared / "model")
    made = _complete(model, tokenizer, prompts, config.completion_tokens, manifest["bos"])
    return {"prompts": prompts, "completions": made}


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
