"""What is measured of a model, alike for ours, published methods' and the reference: perplexity, divergence, accuracies."""

import importlib.metadata
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks import harness, models, progress, store
from tasks.config import by_effort
from tasks.expected import Expected
from windquant.evaluate import score

log = logging.getLogger("windquant")
REFERENCE = "reference"
"""Its name among the methods."""


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


def tasks_of(config: BenchmarkConfig) -> list[str]:
    return list(config.tasks or ["last_word", *harness.available(Path(config.data_dir))])


def facts(config: BenchmarkConfig, manifest: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """What makes numbers comparable: rows with other facts are not set beside each other."""
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


def expected(config: BenchmarkConfig, device: torch.device) -> Expected:
    """What the reference expects of the windows that perplexity is measured on."""
    return Expected("test", config.windows or None, device)


def measure(
    method: str, model: Any, reference: Expected, config: BenchmarkConfig, manifest: dict[str, Any]
) -> dict[str, float]:
    """Perplexity, divergence and accuracies of a loaded model, under the keys that all models have."""
    prepared, names = store.path("prepare"), tasks_of(config)
    compared = (reference, None) if method == REFERENCE else (model, reference)
    report = progress.bar(f"perplexity of {method}")
    scores = score(compared[0], reference.ids, manifest["eval_stride"], compared[1], report)
    tokenizer = models.tokenizer(prepared / "model")
    articles, _ = store.load_table(prepared / "text" / "test.parquet")
    log.info("%s: perplexity %.2f over %d tokens; lm-eval on %s", method, scores.perplexity, scores.tokens, ", ".join(names))
    accuracy = harness.evaluate(
        model, tokenizer, names, data_dir=Path(config.data_dir), articles=articles["text"], bos=manifest["bos"],
        limit=config.limit or 0, batch_size=config.batch_size, few_shot=config.few_shot,
        max_length=manifest["windows"]["test"][1],
    )  # fmt: skip
    plain = [v for k, v in accuracy.items() if k.startswith("acc/")]
    return {
        "perplexity": scores.perplexity,
        "nll": scores.nll,
        "kl_to_reference": scores.kl or 0.0,
        "acc_mean": sum(plain) / len(plain) if plain else 0.0,
        **accuracy,
    }
