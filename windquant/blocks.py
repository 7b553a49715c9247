"""Walking a causal language model block by block, so that one decoder block is in memory at a time.

A model is built without weights (parameters on the meta device, buffers real). `Walk` materialises the *shell*
(embeddings, final norm, head) or one block from a weight source, and puts it back. No architecture is named: the
blocks are the model's longest list of modules with linear layers, the matrices their `nn.Linear` modules, and what a
block is called with (rotary embeddings, masks, which differ between layers in some models) is recorded from the
model's own forward pass.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from windquant import experts
from windquant.errors import InputError
from windquant.units import Matrix

WeightSource = Callable[[Callable[[str], bool]], dict[str, Tensor]]
"""Returns the checkpoint's tensors whose names satisfy a predicate."""


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Path and list of the decoder blocks. Raises InputError when the model has no list of blocks with nn.Linear."""
    lists: dict[str, nn.ModuleList] = {}
    for name, m in model.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in lists)  # e.g. experts: there may be more of them than blocks
        if isinstance(m, nn.ModuleList) and not inner and any(isinstance(x, nn.Linear) for x in m.modules()):
            lists[name] = m
    if not lists:
        raise InputError(f"{type(model).__name__} has no list of decoder blocks with nn.Linear layers to quantize")
    return max(lists.items(), key=lambda item: len(item[1]))


def inside(prefix: str, name: str) -> tuple[int, str]:
    """A matrix's block, and its path in there. prefix: as `decoder_blocks` gives it."""
    block, _, inner = name.removeprefix(f"{prefix}.").partition(".")
    return int(block), inner


def linears(block: nn.Module) -> dict[str, nn.Linear]:
    """The block's linear layers by their path inside the block, but for the routers of its experts."""
    routers = experts.routers(block)
    return {n: m for n, m in block.named_modules() if isinstance(m, nn.Linear) and f"{n}.weight" not in routers}


def outside_linears(model: nn.Module) -> str | None:
    """The first weight matrix of a decoder block that is in no nn.Linear and no router (convolutions, ...), if any."""
    prefix, blocks = decoder_blocks(model)
    for i, block in enumerate(blocks):
        inside = {f"{name}.weight" for name in linears(block)} | experts.routers(block)
        for name, p in block.named_parameters():
            if p.ndim > 1 and name not in inside:
                return f"{prefix}.{i}.{name}"
    return None


def matrices(model: nn.Module) -> list[Matrix]:
    """The quantized matrices (the body), block by block."""
    prefix, blocks = decoder_blocks(model)
    return [m for i, block in enumerate(blocks) for m in _matrices_of(block, f"{prefix}.{i}", i)]


def _matrices_of(block: nn.Module, path: str, index: int) -> list[Matrix]:
    return [Matrix(f"{path}.{name}", index, m.out_features, m.in_features) for name, m in linears(block).items()]


class _Stand(nn.Module):
    """Stands in for a decoder block: records its arguments, returns `output`, or its input when that is None."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # In a list, lest the block be registered as a child and moved about with the shell.
        self._block = [block]
        self.output: Tensor | None = None
        self.input: Tensor | None = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._block[0], name)  # models read e.g. `attention_type` off their layers

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.input, self.args, self.kwargs = hidden, args, kwargs
        return hidden if self.output is None else self.output


class Walk:
    """One model, one weight source, one device; hands out its shell and its blocks, materialised while in use."""

    def __init__(self, model: nn.Module, source: WeightSource, device: torch.device) -> None:
        self.model, self.source, self.device = model.eval().requires_grad_(False), source, device
        self.prefix, self._blocks = decoder_blocks(model)
        self._called: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def path(self, index: int, name: str) -> str:
        """The path in the model of what has the path `name` in block `index`."""
        return f"{self.prefix}.{index}.{name}"

    def matrices(self, index: int) -> list[Matrix]:
        """The matrices of one block."""
        return _matrices_of(self._blocks[index], f"{self.prefix}.{index}", index)

    def fits(self, expected: Iterable[Matrix]) -> bool:
        """Whether the model's matrices are exactly these."""
        return set(expected) == set(matrices(self.model))

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """The decoder block with its weights, float32, on the device."""
        block, prefix = self._blocks[index], self.path(index, "")
        try:
            found = self.source(lambda name: name.startswith(prefix))
            _assign(block, {name.removeprefix(prefix): found.pop(name) for name in list(found)}, self.device)
            _check_complete(block, f"block {index}")
            yield block
        finally:
            _release(block)

    @contextmanager
    def shell(self) -> Iterator[list[_Stand]]:
        """The model around its blocks, which are replaced by stand-ins."""
        stands = [_Stand(b) for b in self._blocks]
        originals = list(self._blocks)
        inside = f"{self.prefix}."
        try:
            for i, stand in enumerate(stands):
                self._blocks[i] = stand
            _assign(self.model, self.source(lambda name: not name.startswith(inside)), self.device)
            self.model.tie_weights()  # pyright: ignore[reportCallIssue]
            _check_complete(self.model, "the model around its blocks")
            yield stands
        finally:
            for i, block in enumerate(originals):
                self._blocks[i] = block
            _release(self.model)

    @torch.no_grad()
    def embed(self, windows: Tensor) -> Tensor:
        """Token ids (n, T) -> the first block's inputs (n, T, hidden), on the CPU; records what blocks are called with."""
        with self.shell() as stands:
            hidden = []
            for row in windows:
                self.model(input_ids=row[None].to(self.device), use_cache=False)
                assert stands[0].input is not None
                hidden.append(stands[0].input.cpu())
            self._called = [(s.args, s.kwargs) for s in stands]
        return torch.cat(hidden)

    def run(self, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
        """Windows (n, T, hidden) through a materialised block, with the arguments the model gave it in `embed`."""
        args, kwargs = self._called[index]
        out = block(hidden, *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """A function from the last block's output (1, T, hidden) to logits (1, T, vocabulary)."""
        with self.shell() as stands:

            def logits(hidden: Tensor) -> Tensor:
                stands[-1].output = hidden
                ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self.device)
                return self.model(input_ids=ids, use_cache=False).logits

            yield logits


def _assign(module: nn.Module, tensors: dict[str, Tensor], device: torch.device) -> None:
    """Give a module its tensors, float32, emptying the dict; what else a checkpoint carries (rotary buffers) is left out."""
    own = module.state_dict().keys()
    held = {}
    while tensors:  # emptied as it goes, lest a block be there twice
        name, t = tensors.popitem()
        if name in own:
            held[name] = t.to(device, torch.float32, copy=True)
    module.load_state_dict(held, strict=False, assign=True)
    module.requires_grad_(False)
    for m in module.modules():
        for name, buffer in m.named_buffers(recurse=False):
            m.register_buffer(name, buffer.to(device), persistent=name not in m._non_persistent_buffers_set)


def _check_complete(module: nn.Module, what: str) -> None:
    missing = [name for name, p in module.named_parameters() if p.is_meta]
    if missing:
        raise InputError(f"the model's weights do not fit its config: {what} lacks {missing[0]}; copy the model again")


def _release(module: nn.Module) -> None:
    """Parameters back to the meta device; buffers stay, they are not in the checkpoint."""
    for m in module.modules():
        for name, p in list(m.named_parameters(recurse=False)):
            setattr(m, name, nn.Parameter(p.detach().to("meta"), requires_grad=False))
