"""Models on disk: skeletons without weights, weight sources shard by shard, whole models, tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tasks.errors import UserError, first_line
from windquant import experts
from windquant.blocks import Walk, WeightSource


def config(folder: Path) -> Any:
    from transformers import AutoConfig

    quiet()
    try:
        found = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as e:
        raise UserError(f"{folder} has no config.json that transformers can read: {first_line(e)}") from e
    vars(found).pop("quantization_config", None)  # ours is read by windquant.checkpoint, a skeleton is dense
    return found


def skeleton(model_config: Any) -> Any:
    """The causal language model without weights: parameters on the meta device, buffers real, experts taken apart."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    except ValueError as e:
        raise UserError(f"model_type '{model_config.model_type}' is not a causal language model: {first_line(e)}") from e
    experts.unfuse_(model)
    model.tie_weights()  # parameters put on the meta device one by one are tied no more
    return model


def shards(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        names = json.loads(index.read_text())["weight_map"]
        missing = sorted({f for f in names.values() if not (folder / f).exists()})
        if missing:
            raise UserError(f"{folder} lacks the shard {missing[0]} that its index names; copy the folder again")
        return {name: folder / f for name, f in names.items()}
    if not single.exists():
        raise UserError(
            f"{folder} has no model.safetensors; save the model with `save_pretrained` (pickled .bin files are refused)"
        )
    try:
        with safe_open(single, "pt") as f:
            return dict.fromkeys(f.keys(), single)
    except Exception as e:  # safetensors' own error is not exported everywhere
        raise UserError(f"{single} is damaged or cut short ({first_line(e)}); copy the model again") from e


def check_shapes(folder: Path, model: Any) -> bool:
    """Whether every parameter of the model lies in the folder under its own name. Raises UserError when one has another
    shape than the config says."""
    where = shards(folder)
    named = dict(model.named_parameters())
    for file in sorted(set(where.values())):
        with safe_open(file, "pt") as f:
            for name in f.keys() & named.keys():
                found, wanted = tuple(f.get_slice(name).get_shape()), tuple(named[name].shape)
                if found != wanted:
                    raise UserError(
                        f"{name} in {file} has the shape {found}, its config.json says {wanted}; "
                        f"config and weights are of different models"
                    )
    return named.keys() <= where.keys()


def weight_source(folder: Path) -> WeightSource:
    where = shards(folder)

    def read(wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        by_file: dict[Path, list[str]] = {}
        for name, file in where.items():
            if wanted(name):
                by_file.setdefault(file, []).append(name)
        tensors = {}
        for file, names in by_file.items():
            with safe_open(file, "pt") as f:
                tensors |= {n: f.get_tensor(n) for n in names}
        return tensors

    return read


def walk(folder: Path, device: torch.device, source: WeightSource | None = None) -> Walk:
    """The model of a folder, with the folder's weights or others."""
    return Walk(skeleton(config(folder)), source or weight_source(folder), device)


def load(folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A whole model, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    quiet()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval().requires_grad_(False).to(device)


def reference(folder: Path, device: torch.device) -> Any:
    """The whole reference model, float32, from a folder that `prepare` made: experts may be in pieces there that
    transformers would not put together."""
    from transformers import GenerationConfig

    model = skeleton(config(folder))
    tensors = weight_source(folder)(lambda name: True)
    model.load_state_dict({n: t.to(device, torch.float32) for n, t in tensors.items()}, strict=False, assign=True)
    model.tie_weights()
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval().requires_grad_(False).to(device)


def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as e:
        raise UserError(
            f"{folder} has no tokenizer that transformers can read; put the model's tokenizer.json and "
            f"tokenizer_config.json beside its weights"
        ) from e


def quiet() -> None:
    """No bars from transformers: ours say what is going on."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
