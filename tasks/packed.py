"""Loading checkpoints of ours, the way their users do: through transformers."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tasks import models
from tasks.errors import UserError, first_line
from windquant import checkpoint, plugin
from windquant.layers import PackedLinear
from windquant.quantize import PackedMatrix

COMPANIONS = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template", "generation_config")


def load(folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A packed checkpoint, its matrices packed in memory too. Raises UserError when it is not whole."""
    try:
        checkpoint.files(folder)
        model = models.load(folder, device, dtype)
    except checkpoint.CheckpointError as e:
        raise UserError(str(e)) from e
    except (OSError, ValueError, TypeError, KeyError) as e:  # what transformers has to say of a config.json
        raise UserError(f"{folder} cannot be loaded: {first_line(e)}{checkpoint.AGAIN}") from e
    if not isinstance(model.hf_quantizer, plugin.WindquantQuantizer):
        raise AssertionError(f"transformers loaded {folder} without this format's quantizer: its weights are made up")
    return model


def matrices(model: Any) -> Iterator[tuple[str, PackedLinear, PackedMatrix]]:
    """The packed layers of a loaded model, each with what it holds."""
    quantization = model.hf_quantizer.quantization_config.quantization
    for name, (rows, columns, symbols) in quantization.plan.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, PackedLinear)
        parts = layer.codes, layer.scale, layer.span, layer.salient
        yield name, layer, PackedMatrix(rows, columns, quantization.chunk_size, symbols, *parts)


def export_dense(folder: Path, out: Path) -> None:
    """The checkpoint as a plain one in bfloat16, for programs that do not know ours; tokenizer and all beside it.

    What was written is loaded back and compared: of weights under names that it does not know transformers makes some up.
    """
    model = load(folder, torch.device("cpu"), torch.bfloat16).dequantize(torch.bfloat16)
    model.save_pretrained(out)
    copy_companions(folder, out)
    written, again = model.state_dict(), models.load(out, torch.device("cpu"), torch.bfloat16).state_dict()
    wrong = [n for n in sorted(written.keys() | again.keys()) if n not in again or not torch.equal(written[n], again[n])]
    if wrong:
        raise AssertionError(f"{out}: {wrong[0]} does not come back as it was written")


def copy_companions(source: Path, out: Path) -> None:
    """What belongs to a model beside its weights: tokenizer, chat template, generation config."""
    for f in sorted(source.iterdir()):
        if f.name.startswith(COMPANIONS):
            shutil.copyfile(f, out / f.name)
