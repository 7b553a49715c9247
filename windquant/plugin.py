"""Packed checkpoints for transformers: `import windquant`, then `AutoModelForCausalLM.from_pretrained(folder)`.

The one module of the library that imports transformers. `windquant/__init__.py` imports it when transformers loads its
quantizers. A checkpoint that is not whole, or not of the model its config.json names, is refused before a weight is read:
transformers by itself would fill what is missing with random numbers and warn. (Where config.json has lost its
`quantization_config`, it never asks, and does so.)
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from windquant import checkpoint, experts
from windquant.checkpoint import CheckpointError, Quantization
from windquant.errors import InputError
from windquant.layers import Packed, PackedEmbedding, PackedLinear, TiedHead
from windquant.salient import Protection


class WindquantConfig(QuantizationConfigMixin):
    """The `quantization_config` of a checkpoint. Raises CheckpointError as `checkpoint.Quantization` does."""

    def __init__(self, **found: Any) -> None:
        self.quantization = Quantization.of({"quant_method": "windquant"} | found)
        self.quant_method = "windquant"  # pyright: ignore[reportAttributeAccessIssue]

    def to_dict(self) -> dict[str, Any]:
        return self.quantization.to_dict()

    def __iter__(self) -> Any:
        yield from self.to_dict().items()


class WindquantQuantizer(HfQuantizer):
    """Puts packed layers in place of the dense ones; their buffers have the names of the checkpoint's tensors."""

    requires_calibration = True  # a dense model is quantized by the pipeline, not on the fly
    quantization_config: WindquantConfig

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> Any:
        if not checkpoint_files or not all(f.endswith(".safetensors") for f in checkpoint_files):
            raise CheckpointError("a packed checkpoint is read from safetensors only; this folder holds other weight files")
        experts.unfuse_(model)  # the plan names every expert's matrices
        replace_layers(model, self.quantization_config.quantization)
        tied = dict(model.all_tied_weights_keys)
        wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        files = [Path(f) for f in checkpoint_files]
        stored = checkpoint.headers(files)
        checkpoint.check_digests(files, self.quantization_config.quantization)
        checkpoint.check_fits(stored, wanted, optional=tied)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, module in model.named_modules():
            if isinstance(module, Packed):
                try:
                    module.check()
                except InputError as e:
                    raise CheckpointError(f"{name}: {e}{checkpoint.AGAIN}") from e
        for name, p in model.named_parameters():  # by their extremes, which pass NaN on and take no copy
            if p.numel() and not bool(torch.isfinite(torch.stack(p.aminmax())).all()):
                raise CheckpointError(f"{name} holds NaN or Inf{checkpoint.AGAIN}")
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[None, dict[str, str]]:
        return None, {checkpoint.DIGEST: self.quantization_config.quantization.digest}

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        wanted = model.dtype if dtype is None else dtype
        restore_layers(model, wanted)
        experts.fuse_(model)  # else save_pretrained would write names that transformers puts together for some models alone
        for p in model.parameters():  # not buffers: rotary frequencies stay in float32
            p.data = p.data.to(wanted)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def replace_layers(model: Any, quantization: Quantization) -> None:
    """Put an empty packed layer in the place of every matrix that the plan names. Raises CheckpointError when a plan is
    not the model's."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if head is None:
        raise CheckpointError(f"{type(model).__name__} has no language model's head; load with AutoModelForCausalLM")
    tied = bool(model.all_tied_weights_keys)
    for table, protected in ((quantization.plan, quantization.protection), (quantization.embeddings, None)):
        for name, (rows, columns, symbols) in table.items():
            try:
                dense: Any = model.get_submodule(name)
                expected = tuple(dense.weight.shape)
            except AttributeError:
                raise CheckpointError(f"the plan names {name}, which the model of its config.json has not") from None
            if (rows, columns) != expected:
                raise CheckpointError(
                    f"{name} is {rows} x {columns} in the plan and {' x '.join(map(str, expected))} by config.json: "
                    f"plan and config are of different models"
                )
            model.set_submodule(name, _packed(dense, rows, columns, quantization.chunk_size, symbols, protected))
    packed = model.get_input_embeddings()
    if tied and packed is not embedding:
        model.set_output_embeddings(TiedHead(packed, head.bias))
        # Tied by construction; transformers would look for its weight.
        model._tied_weights_keys, model.all_tied_weights_keys = {}, {}


def _packed(
    dense: nn.Module, rows: int, columns: int, chunk_size: int, symbols: str, protected: Protection | None
) -> Packed:
    if isinstance(dense, nn.Embedding):
        return PackedEmbedding(rows, columns, chunk_size, symbols)
    return PackedLinear(rows, columns, chunk_size, symbols, dense.bias is not None, protected)


def restore_layers(model: Any, dtype: torch.dtype) -> None:
    """Put a dense layer in the place of every packed one, its weights rounded to dtype once; a tied head stays tied."""
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedEmbedding):
            model.set_submodule(name, _dense(nn.Embedding(1, 1, device="meta"), module, dtype))
        elif isinstance(module, PackedLinear):
            layer: Any = nn.Linear(1, 1, bias=module.bias is not None, device="meta")
            layer.bias = module.bias
            model.set_submodule(name, _dense(layer, module, dtype))
    if isinstance(head, TiedHead):
        layer = nn.Linear(1, 1, bias=head.bias is not None, device="meta")
        layer.weight, layer.bias = model.get_input_embeddings().weight, head.bias
        layer.in_features, layer.out_features = head.in_features, head.out_features
        model.set_output_embeddings(layer)
        del model._tied_weights_keys
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _dense(layer: Any, packed: Packed, dtype: torch.dtype) -> nn.Module:
    layer.weight = nn.Parameter(packed.dequantize(dtype), requires_grad=False)
    for name in ("in_features", "out_features", "num_embeddings", "embedding_dim"):
        if name in vars(packed):
            setattr(layer, name, getattr(packed, name))
    return layer


# Not as decorators: they hide the classes' own types.
register_quantization_config("windquant")(WindquantConfig)
register_quantizer("windquant")(WindquantQuantizer)
