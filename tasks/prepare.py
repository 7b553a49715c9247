"""Stage 1: model and text to local, hashed, checked artifacts.

Out: model/ (safetensors, tokenizer), text/<split>.parquet, windows/<split>.safetensors, manifest.json.
"""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks import models, preflight, sources, store, text
from tasks.config import by_effort
from tasks.errors import UserError, first_line
from tasks.job import Job, Record
from windquant import blocks, experts

log = logging.getLogger("windquant")


@dataclass(frozen=True)
class PrepareConfig:
    """model: the reference. text: calibration, training, validation and test text. eval_text: when given, validation and
    test come from it and not from `text`. window: tokens of a calibration or training window. calibration_windows: how
    many. eval_window, eval_stride: tokens of a perplexity window, and their distance (equal: no overlap).
    """

    model: str = ""
    text: str = ""
    eval_text: str | None = None
    window: int = 512
    calibration_windows: int | None = by_effort(demo=32, full=128)
    eval_window: int = 1024
    eval_stride: int = 1024

    def __post_init__(self) -> None:
        for name in ("window", "eval_window", "eval_stride"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} {getattr(self, name)} is too short: at least 2 tokens")
        if self.eval_stride > self.eval_window:
            raise ValueError(f"eval_stride {self.eval_stride} skips tokens: at most eval_window, {self.eval_window}")
        if self.calibration_windows is not None and self.calibration_windows < 1:
            raise ValueError(f"calibration_windows {self.calibration_windows} is not at least 1")


def run(config: PrepareConfig, job: Job) -> Record:
    kind, rest = sources.scheme(config.model)
    sources.scheme(config.text)
    models.quiet()
    cache = store.home() / ".state/sources"  # one for all copies of the project
    file = {"hf": sources.hf_model, "path": sources.local, "pypi": lambda r: sources.pypi(r, cache)}[kind](rest)
    tokenizer, model_config = _check_model(file)
    skeleton = models.skeleton(model_config)
    _check_architecture(skeleton, config, job)
    facts = preflight.check(skeleton, config)
    own_names = file.is_dir() and models.check_shapes(file, skeleton)
    log.info("preflight: %s", preflight.sentence(facts))
    log.info("preflight: %s", job.check_target(skeleton))
    _import_model(file, own_names, job.out / "model")
    _try_walk(job)
    articles = _articles(config, cache)
    windows = _windows(config, articles, tokenizer)
    for split, ids in windows.items():
        store.save_tensors(job.out / "windows" / f"{split}.safetensors", {"ids": ids})
        columns = {k: [a[k] for a in articles[split]] for k in ("title", "text")}
        store.save_table(job.out / "text" / f"{split}.parquet", columns, {"split": split})
    manifest: dict[str, Any] = facts | {
        "model": config.model,
        "model_hash": store.hash_tree(job.out / "model", "*.safetensors"),
        "text": config.text,
        "text_hash": store.hash_tree(job.out / "text"),
        "windows_hash": store.hash_tree(job.out / "windows"),
        "bos": text.begins_with_bos(tokenizer),
        "articles": {k: len(v) for k, v in articles.items()},
        "windows": {k: list(v.shape) for k, v in windows.items()},
        "eval_stride": config.eval_stride,
    }
    store.save_json(job.out / "manifest.json", manifest)
    for split, ids in windows.items():
        log.info("%-11s %4d articles, %5d windows of %d tokens", split, len(articles[split]), *ids.shape)
    flat = {k: v for k, v in manifest.items() if isinstance(v, str | bool)}
    return Record(
        params=flat | {f"windows/{k}": v[0] for k, v in manifest["windows"].items()},
        metrics={k: float(v) for k, v in facts.items()},
        files=[job.out / "manifest.json"],
    )


def _check_model(file: Path) -> tuple[Any, Any]:
    """Tokenizer and config, before anything large is read. file: a folder, or a GGUF file."""
    if file.is_dir():
        model_config = models.config(file)
        if "quantization_config" in store.load_json(file / "config.json"):
            raise UserError(f"{file} is quantized already; give the original, unquantized model")
        models.shards(file)
        tokenizer = models.tokenizer(file)
    elif file.suffix == ".gguf":
        from transformers import AutoConfig, AutoTokenizer

        try:
            model_config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        except Exception as e:  # the reader's errors on damaged files are of many kinds
            raise UserError(f"{file} cannot be read as GGUF: {first_line(e)}; copy the file again") from e
    else:
        raise UserError(f"{file} is no model: give a folder with config.json and safetensors, or a .gguf file")
    if len(tokenizer) > model_config.get_text_config().vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embeddings {model_config.vocab_size}: "
            f"they do not belong together; take the tokenizer from the model's own folder"
        )
    return tokenizer, model_config


def _check_architecture(skeleton: Any, config: PrepareConfig, job: Job) -> None:
    kind, outside = skeleton.config.model_type, blocks.outside_linears(skeleton)
    if outside is not None:
        raise UserError(
            f"model_type '{kind}' keeps weights of its blocks outside nn.Linear layers ({outside}), which would stay "
            f"unquantized; choose a model without convolutions and the like"
        )
    longest = getattr(skeleton.config.get_text_config(), "max_position_embeddings", None)
    for name in ("window", "eval_window"):
        if longest is not None and getattr(config, name) > longest:
            raise UserError(f"prepare.{name} is {getattr(config, name)}, the model reads at most {longest} tokens; lower it")
    _ = job.device  # asks for a GPU that is not there now, not in the next stage


def _try_walk(job: Job) -> None:
    """The first block on a few tokens, the way the next stages run it."""
    walk = models.walk(job.out / "model", job.device)
    try:
        hidden = walk.embed(torch.arange(8)[None])
        with walk.block(0) as block, torch.no_grad():
            hidden = walk.run(0, block, hidden.to(job.device))
        with walk.head() as head, torch.no_grad():
            head(hidden)
    except (TypeError, IndexError, AttributeError, RuntimeError) as e:
        kind = models.config(job.out / "model").model_type
        raise UserError(
            f"model_type '{kind}' cannot be run block by block ({first_line(e)}); LLaMA-like models of transformers can"
        ) from e


def _import_model(file: Path, own_names: bool, out: Path) -> None:
    """The model's folder as the later stages read it: safetensors under the names of the model's own parameters, which
    a folder has or not (own_names)."""
    if file.is_dir():
        out.mkdir(parents=True)
        for f in sorted(file.iterdir()):
            if f.is_file() and f.suffix in (".json", ".model", ".jinja", ".txt"):
                shutil.copyfile(f, out / f.name)
        if own_names:
            for shard in sorted(set(models.shards(file).values())):
                shutil.copyfile(shard, out / shard.name)
        else:
            (out / "model.safetensors.index.json").unlink(missing_ok=True)
            _save_renamed(file, out)
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    log.info("dequantizing %s, about half a minute for 135 M weights", file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # The GGUF config survives dequantization and would make save_pretrained refuse.
    vars(model.config).pop("quantization_config", None)
    _save(model, out)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)


def _save_renamed(file: Path, out: Path) -> None:
    """For folders whose tensors are named otherwise (older formats, fused experts): transformers knows how to map them."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(file, dtype="auto", output_loading_info=True)
    model, info = loaded
    if info["missing_keys"]:
        raise UserError(f"{file} lacks the weights {sorted(info['missing_keys'])[0]}; copy the folder again")
    _save(model, out)


def _save(model: Any, out: Path) -> None:
    """Under the names of the skeleton's parameters, not those of the format the model came in."""
    experts.unfuse_(model)
    model.save_pretrained(out, save_original_format=False)


def _articles(config: PrepareConfig, cache: Path) -> dict[str, list[dict[str, str]]]:
    own = _splits(config.text, cache)
    if config.eval_text is None:
        return own
    other = _splits(config.eval_text, cache)
    return own | {k: other[k] for k in ("validation", "test")}


def _splits(source: str, cache: Path) -> dict[str, list[dict[str, str]]]:
    """A hub dataset's own validation and test splits stand; everything else is split by article."""
    kind, rest = sources.scheme(source)
    if kind != "hf":
        return text.split_articles(text.local_articles(sources.local(rest) if kind == "path" else sources.pypi(rest, cache)))
    found = text.hub_articles(rest)
    train = text.split_articles(found["train"] if "train" in found else next(iter(found.values())))
    return train | {k: found[k] for k in ("validation", "test") if k in found}


def _windows(config: PrepareConfig, articles: dict[str, Any], tokenizer: Any) -> dict[str, torch.Tensor]:
    out = {}
    for split in articles:
        evaluation = split in ("validation", "test")
        length = config.eval_window if evaluation else config.window
        stride = config.eval_stride if evaluation else config.window
        out[split] = text.token_windows(articles[split], tokenizer, length, stride, split)
    wanted = config.calibration_windows or 0
    if len(out["calibration"]) < wanted:
        raise UserError(
            f"the calibration text gives {len(out['calibration'])} windows of {config.window} tokens, "
            f"prepare.calibration_windows asks for {wanted}; bring more text or lower it"
        )
    out["calibration"] = out["calibration"][:wanted]
    return out
