"""Mixtures of experts, taken apart into one nn.Linear an expert and projection.

transformers fuses the experts of a layer into 3-D parameters (`gate_up_proj` or `up_proj`, and `down_proj`; their layout
is told by the attributes that `use_experts_implementation` sets). Taken apart, every expert is a few ordinary matrices
under the names that most checkpoints on disk have, `experts.<n>.gate_proj`, `up_proj`, `down_proj`, and nothing
downstream needs to know of experts but `calibrate`, to which some of them may show no tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn

INNER = "down_proj"
"""The projection fed by the expert's own neurons; the others are fed by what all experts of the layer are fed by."""
_LAYOUT = {"has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated"}
_PARAMETERS = ({"gate_up_proj", "down_proj"}, {"up_proj", "down_proj"})


class Experts(nn.ModuleList):
    """The experts of one layer, each a module of linear layers. fused: transformers' module; it loses its parameters."""

    def __init__(self, fused: Any) -> None:
        super().__init__(_expert(fused, i) for i in range(len(fused.down_proj)))
        for name in list(fused._parameters):
            delattr(fused, name)
        self._fused = [fused]  # in a list, lest it be registered: what is left of it is how it applies its gate

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: (tokens, hidden). top_k_index, top_k_weights: (tokens, k), what the router chose; an index past
        the last expert means none. Returns (tokens, hidden)."""
        out = torch.zeros_like(hidden_states)
        for i in top_k_index.unique().tolist():
            if i < len(self):
                token, slot = torch.where(top_k_index == i)
                y = self.run(self[i], hidden_states[token]) * top_k_weights[token, slot, None]
                out.index_add_(0, token, y.to(out.dtype))
        return out

    def fuse(self) -> nn.Module:
        """transformers' module, with the experts' weights."""
        (fused,) = self._fused
        names = ("gate_up_proj", "down_proj") if fused.has_gate else ("up_proj", "down_proj")
        for name in names:
            weights = torch.stack([self._together(e, name, "weight") for e in self])
            weights = weights.transpose(1, 2).contiguous() if fused.is_transposed else weights
            setattr(fused, name, nn.Parameter(weights, requires_grad=False))
            if fused.has_bias:
                biases = torch.stack([self._together(e, name, "bias") for e in self])
                setattr(fused, f"{name}_bias", nn.Parameter(biases, requires_grad=False))
        return fused

    def _together(self, expert: Any, name: str, part: str) -> Tensor:
        """A fused projection of one expert, its outputs in the first dimension."""
        (fused,) = self._fused
        if name != "gate_up_proj":
            return getattr(expert.get_submodule(name), part).detach()
        halves = [getattr(expert.get_submodule(half), part).detach() for half in ("gate_proj", "up_proj")]
        return torch.cat(halves) if fused.is_concatenated else torch.stack(halves, 1).flatten(0, 1)

    def run(self, expert: Any, x: Tensor) -> Tensor:
        (fused,) = self._fused
        if not fused.has_gate:
            return expert.down_proj(fused.act_fn(expert.up_proj(x)))
        halves = expert.gate_proj(x), expert.up_proj(x)
        both = torch.cat(halves, -1) if fused.is_concatenated else torch.stack(halves, -1).flatten(-2)
        return expert.down_proj(fused._apply_gate(both))


def unfuse_(model: nn.Module) -> None:
    """Replace the fused experts in a model, on the meta device or not. What is fused in another way stays as it is."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if _is_fused(child):
                setattr(module, name, Experts(child))


def fuse_(model: nn.Module) -> None:
    """Inverse of `unfuse_`: transformers' own modules, with parameters, in the place of experts that are plain linear
    layers."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Experts):
                setattr(module, name, child.fuse())


def groups(block: nn.Module) -> list[list[str]]:
    """Paths of the linear layers that are one projection of all experts of a layer, expert by expert."""
    return [
        [f"{path}.{i}.{projection}" for i in range(len(m))]
        for path, m in block.named_modules()
        if isinstance(m, Experts)
        for projection, _ in m[0].named_children()
    ]


def routers(block: nn.Module) -> set[str]:
    """Names of the weights that choose experts, which are not to be quantized: a small error there swaps an expert.

    They are known by their shape (one row an expert) and place: nearest to the experts, least deep if there are several
    (of Qwen3-Next's 512 experts a shared one has 512 rows too).
    """
    found = set()
    for path, m in block.named_modules():
        if isinstance(m, Experts):
            beside: list[str] = []
            parent = path
            while parent and not beside:
                parent = parent.rpartition(".")[0]
                beside = [
                    name
                    for name, p in block.get_submodule(parent).named_parameters(parent)
                    if p.ndim == 2 and len(p) == len(m) and not name.startswith(f"{path}.")
                ]
            least = min((name.count(".") for name in beside), default=0)
            found |= {name for name in beside if name.count(".") == least}
    return found


def _is_fused(module: nn.Module) -> bool:
    own = dict(module.named_parameters())
    matrices = {name for name, p in own.items() if p.ndim == 3}
    biases = {f"{name}_bias" for name in matrices}
    return (
        vars(module).keys() >= _LAYOUT
        and matrices in _PARAMETERS
        and own.keys() <= matrices | biases
        and not vars(module)["has_post_expert_norm"]
    )


def _expert(fused: Any, index: int) -> nn.Module:
    expert = nn.Module()
    for name in ("gate_up_proj", "up_proj", "down_proj"):
        if name not in fused._parameters:
            continue
        weight = fused._parameters[name][index]
        weight = weight.T if fused.is_transposed else weight
        bias = fused._parameters[f"{name}_bias"][index] if fused.has_bias else None
        if name != "gate_up_proj":
            expert.add_module(name, _linear(weight, bias))
            continue
        half = len(weight) // 2
        rows = (slice(half), slice(half, None)) if fused.is_concatenated else (slice(0, None, 2), slice(1, None, 2))
        for part, r in zip(("gate_proj", "up_proj"), rows, strict=True):
            expert.add_module(part, _linear(weight[r], None if bias is None else bias[r]))
    return expert


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta", dtype=weight.dtype)
    # Copies: a view would keep the fused tensor alive, and safetensors refuses to save views of one tensor.
    layer.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(memory_format=torch.contiguous_format), bias.requires_grad)
    return layer
