"""What the data say about every matrix: input second moments, activation scales, and the Fisher weight of its rows.

Block by block, forward then backward, so that one block's weights and moments are on the device at a time. Activations
between blocks go to a scratch store: they are what an interrupted run resumes from.

Notation, per matrix y = W x: H = E[x x^T] (columns, columns); a = E|x| (columns); g = E[(dS/dy)^2] (rows), the expected
squared gradient of S, the summed next-token loss, with labels drawn from the model itself, so that g is the diagonal of
the Fisher information (and of the Gauss-Newton matrix) at the output and not the empirical one. E is over tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from windquant.blocks import Walk, linears
from windquant.errors import InputError

Report = Callable[[int, int], None]
"""Called with (done, total) after each piece of work."""


class Scratch(Protocol):
    """Named sets of tensors that survive an interruption."""

    def has(self, name: str) -> bool: ...
    def get(self, name: str) -> dict[str, Tensor]: ...
    def put(self, name: str, tensors: dict[str, Tensor]) -> None: ...


@dataclass
class Inputs:
    """Accumulates H and a over the distinct inputs of one block; linear layers fed the same tensor share one."""

    moment: dict[str, Tensor] = field(default_factory=dict)
    scale: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)
    """matrix -> the matrix under whose name their common input is kept."""
    block: int = 0

    @contextmanager
    def watch(self, block: nn.Module) -> Iterator[None]:
        seen: list[tuple[Tensor, str]] = []

        def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                x = args[0]
                # The list keeps x alive, so an equal identity is the same tensor.
                for earlier, owner in seen:
                    if earlier is x and self.source.get(name, owner) == owner:
                        self.source[name] = owner
                        return
                seen.append((x, name))
                self.source[name] = name
                self._add(name, x.detach().reshape(-1, x.shape[-1]).float())

            return see

        handles = [m.register_forward_pre_hook(hook(n)) for n, m in linears(block).items()]
        try:
            yield
        finally:
            for h in handles:
                h.remove()

    def _add(self, name: str, x: Tensor) -> None:
        if not bool(torch.isfinite(x).all()):
            raise InputError(
                f"the input of {name} in block {self.block} holds NaN or Inf: the model overflows on the calibration text"
            )
        if name not in self.moment:
            self.moment[name] = x.new_zeros(x.shape[1], x.shape[1])
            self.scale[name] = x.new_zeros(x.shape[1])
            self.tokens[name] = 0
        self.moment[name].addmm_(x.T, x)
        self.scale[name] += x.abs().sum(0)
        self.tokens[name] += x.shape[0]

    def mean(self, matrix: str) -> Tensor:
        """H of a matrix's inputs, (columns, columns)."""
        name = self.source[matrix]
        return self.moment[name] / self.tokens[name]

    def tensors(self) -> dict[str, Tensor]:
        """`H.<input>`, `a.<input>` averaged over tokens, and `source.<matrix>` as the index of its input."""
        names = sorted(self.moment)
        out = {f"source.{m}": torch.tensor(names.index(s)) for m, s in self.source.items()}
        for i, n in enumerate(names):
            out[f"H.{i}"] = self.mean(n).cpu()
            out[f"a.{i}"] = (self.scale[n] / self.tokens[n]).cpu()
        return out


@contextmanager
def _watch_gradients(block: nn.Module, total: dict[str, Tensor]) -> Iterator[None]:
    """Adds the sum over tokens of (dS/dy)^2 of each linear layer to `total`."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def see(_: nn.Module, __: tuple[Tensor, ...], y: Tensor) -> None:
            def add(gradient: Tensor) -> None:
                total[name] = total.get(name, 0) + gradient.float().square().flatten(0, -2).sum(0)

            y.register_hook(add)

        return see

    handles = [m.register_forward_hook(hook(n)) for n, m in linears(block).items()]
    try:
        yield
    finally:
        for h in handles:
            h.remove()


def calibrate(
    walk: Walk, windows: Tensor, generator: torch.Generator, scratch: Scratch, report: Report
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yields (block, statistics) from the last block to the first.

    windows: token ids (n, T), int64. Statistics hold `H.<i>`, `a.<i>` for each distinct input i of the block,
    `source.<matrix>` -> i, and `g.<matrix>`. Raises InputError on NaN or Inf activations, with the matrix's name.
    """
    n, blocks, steps = len(windows), len(walk), 2 * len(walk) + 1
    hidden = walk.embed(windows)
    for i in range(blocks):
        if not scratch.has(f"forward-{i}"):
            scratch.put(f"forward-{i}", _forward(walk, i, _input(scratch, i, hidden)))
        report(i + 1, steps)
    if not scratch.has(f"gradient-{blocks}"):
        out = scratch.get(f"forward-{blocks - 1}")["output"]
        scratch.put(f"gradient-{blocks}", {"gradient": _head_gradient(walk, windows, out, generator)})
    report(blocks + 1, steps)
    for i in reversed(range(blocks)):
        forward = scratch.get(f"forward-{i}")
        if not scratch.has(f"gradient-{i}"):
            gradient = scratch.get(f"gradient-{i + 1}")["gradient"]
            scratch.put(f"gradient-{i}", _backward(walk, i, _input(scratch, i, hidden), gradient))
        fisher = {k: v / (n * windows.shape[1]) for k, v in scratch.get(f"gradient-{i}").items() if k != "gradient"}
        yield i, {k: v for k, v in forward.items() if k != "output"} | fisher
        report(2 * blocks + 1 - i, steps)


def _input(scratch: Scratch, index: int, embedded: Tensor) -> Tensor:
    return embedded if index == 0 else scratch.get(f"forward-{index - 1}")["output"]


@torch.no_grad()
def _forward(walk: Walk, index: int, hidden: Tensor) -> dict[str, Tensor]:
    """The block's outputs for all windows, and the statistics of its inputs."""
    inputs, output = Inputs(block=index), torch.empty_like(hidden)
    with walk.block(index) as block:
        for j, h in enumerate(hidden):
            with inputs.watch(block):
                output[j] = walk.run(index, block, h[None].to(walk.device))[0].cpu()
    return inputs.tensors() | {"output": output}


def _head_gradient(walk: Walk, windows: Tensor, hidden: Tensor, generator: torch.Generator) -> Tensor:
    """dS/dh at the last block's output, labels drawn from the model's own next-token distribution."""
    gradient = torch.empty_like(hidden)
    with walk.head() as head:
        for j, h in enumerate(hidden):
            leaf = h[None].to(walk.device).requires_grad_()
            logp = head(leaf).float().log_softmax(-1)[0]
            label = torch.multinomial(logp.detach().exp().cpu(), 1, generator=generator).to(logp.device)
            (gradient_j,) = torch.autograd.grad(-logp.gather(-1, label).sum(), leaf)
            gradient[j] = gradient_j[0].cpu()
    return gradient


def _backward(walk: Walk, index: int, hidden: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """dS/dh at the block's input, and the squared gradients of its rows, summed over tokens."""
    total: dict[str, Tensor] = {}
    below = torch.empty_like(gradient)
    with walk.block(index) as block, _watch_gradients(block, total):
        for j, h in enumerate(hidden):
            leaf = h[None].to(walk.device).requires_grad_()
            out = walk.run(index, block, leaf)
            (g,) = torch.autograd.grad(out, leaf, gradient[j][None].to(walk.device))
            below[j] = g[0].cpu()
    return {f"g.{k}": v.cpu() for k, v in total.items()} | {"gradient": below}
