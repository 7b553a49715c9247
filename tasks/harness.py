"""lm-eval's tasks: stock ones from the hub, stock ones on local jsonl, a user's own YAML, and our last-word task."""

import json
import logging
import re
import tempfile
from pathlib import Path
from typing import Any

from tasks import lastword
from tasks.errors import UserError, first_line

FIELDS = {
    "arc_easy": ("question", "choices", "answerKey"),
    "arc_challenge": ("question", "choices", "answerKey"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "piqa": ("goal", "sol1", "sol2", "label"),
    "winogrande": ("sentence", "option1", "option2", "answer"),
    "boolq": ("passage", "question", "label"),
    "lambada_openai": ("text",),
}
"""What a row of <data_dir>/<task>.jsonl must hold: the fields of the data set that the stock task reads. A missing one
would not fail: a template renders it as nothing, and the score would be wrong."""


def available(data_dir: Path) -> list[str]:
    """Tasks whose data or definition lies in data_dir."""
    return sorted({f.stem for f in data_dir.glob("*.jsonl")} | {f.stem for f in data_dir.glob("*.yaml")})


def write_definitions(folder: Path, names: list[str], data_dir: Path, articles: list[str], limit: int) -> list[str]:
    """Write task YAML for every task that is ours or local; returns the names to ask lm-eval for, in the same order."""
    asked = []
    for name in names:
        local, own = data_dir / f"{name}.jsonl", data_dir / f"{name}.yaml"
        if name == "last_word":
            rows = lastword.passages(articles)[: limit or None]
            if not rows:
                raise UserError("the test text has no passage that ends in a word it used before; leave last_word out of "
                                "benchmark.tasks or bring longer text")  # fmt: skip
            file = folder / "last_word.jsonl"
            file.write_text("".join(json.dumps(r) + "\n" for r in rows))
            definition = lastword.task(str(file.resolve()))
        elif own.exists():
            definition = {"include": str(own.resolve())}
        elif local.exists():
            definition = _stock_on_local(name, local)
        else:
            asked.append(name)
            continue
        definition["task"] = f"windquant_{name}"
        (folder / f"{name}.yaml").write_text(json.dumps(definition))  # JSON is YAML
        asked.append(definition["task"])
    return asked


def _stock_on_local(name: str, file: Path) -> dict[str, Any]:
    with file.open() as lines:
        try:
            first = json.loads(next(lines, "{}"))
        except json.JSONDecodeError as e:
            raise UserError(f"{file} is not jsonl: {e}; write one JSON object a line") from e
    missing = [f for f in FIELDS.get(name, ()) if f not in first]
    if missing:
        raise UserError(
            f"{file} lacks the field {missing[0]}: a row of {name} holds {', '.join(FIELDS[name])}, as its hub data set does"
        )
    data = str(file.resolve())
    return {
        "include": str(_stock(name)),
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"validation": data}},
        "training_split": None,
        "validation_split": "validation",
        "test_split": None,
        "fewshot_split": "validation",
    }


def _stock(name: str) -> Path:
    import lm_eval

    pattern = re.compile(rf"^task: *['\"]?{re.escape(name)}['\"]? *$", re.MULTILINE)
    for file in sorted((Path(lm_eval.__path__[0]) / "tasks").rglob("*.yaml")):
        if pattern.search(file.read_text(errors="ignore")):
            return file
    raise UserError(f"lm-eval has no task '{name}' to run on local data; give its definition as {name}.yaml beside it")


def evaluate(model: Any, tokenizer: Any, names: list[str], *, data_dir: Path, articles: list[str], bos: bool,
             limit: int, batch_size: int, few_shot: int, max_length: int) -> dict[str, float]:  # fmt: skip
    """`acc/<task>`, `acc_stderr/<task>`, `acc_norm/<task>` ... of a loaded model. limit 0: whole tasks."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    harness: Any = lm_eval  # its decorators hide the signatures
    lm_class: Any = HFLM
    with tempfile.TemporaryDirectory() as folder:
        asked = write_definitions(Path(folder), names, data_dir, articles, limit)
        stock = any(not a.startswith("windquant_") for a in asked)
        lm = lm_class(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length, add_bos_token=bos)
        try:
            manager = TaskManager(include_path=folder, include_defaults=stock)
            found = harness.simple_evaluate(
                lm, tasks=asked, num_fewshot=few_shot or None, limit=limit or None, task_manager=manager,
                log_samples=False, bootstrap_iters=1000, verbosity="ERROR",
            )  # fmt: skip
        except (KeyError, ConnectionError, OSError) as e:
            raise UserError(f"lm-eval could not run {', '.join(names)}: {first_line(e)}; is the name right and the "
                            f"hub reachable? Else put the data into benchmark.data_dir") from e  # fmt: skip
    out = {}
    for name, task in zip(names, asked, strict=True):
        for key, value in found["results"][task].items():
            metric = key.removesuffix(",none")
            if metric in ("acc", "acc_norm", "acc_stderr", "acc_norm_stderr") and isinstance(value, float):
                out[f"{metric}/{name}"] = value
    return out
