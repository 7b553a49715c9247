"""What the data say about every matrix: input second moments, activation scales, and the Fisher weight of its rows.

Block by block, forward then backward, so that one block's weights and moments are on the device at a time. Activations
between blocks go to a scratch store: they are what an interrupted run resumes from.

Notation, per matrix y = W x: H = E[x x^T] (columns, columns); a = E|x| (columns); g = E[(dS/dy)^2] (rows), the expected
squared gradient of S, the summed next-token loss, with labels drawn from the model itself, so that g is the diagonal of
the Fisher information (and of the Gauss-Newton matrix) at the output and not the empirical one. E is over tokens.

An expert of a mixture sees only some tokens: its H and a are means over those, its g is a mean over all tokens (zero where
it was not called), so that 1/2 sum_r g_r e_r^T H e_r is in nats a token of the text for every matrix alike. What stands in
for tokens that it never saw:

- Projections fed by the layer's input: all experts' inputs are samples of one distribution, so each H is shrunk towards
  their pooled mean, which counts as columns / 4 tokens; without tokens the pooled mean is all there is. On SmolLM2-135M
  (block 11's gate_proj, 576 columns, tokens clustered into "experts") this lowered the held-out error of 2-bit rounding
  with error feedback by 28 % at 256 tokens and 20 % at 512, and raised that of plain rounding by 1 to 4 %.
- `experts.INNER`, fed by the expert's own neurons, which correspond to no other expert's: own tokens, however few (from 3 on
  shrinking made it worse, see benchmarks/LOG.md); without tokens the identity at the others' mean level: data-free rounding.
- g without tokens: one token at the mean level of the other experts (the rule of succession): small, not zero.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from windquant import experts
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
    """Accumulates H and a over the distinct inputs of one block; linear layers fed the same tensor share one. Sums while it
    watches, means after `finish_`."""

    moment: dict[str, Tensor] = field(default_factory=dict)
    scale: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)
    """matrix -> the matrix under whose name their common input is kept."""
    prior: dict[str, float] = field(default_factory=dict)
    """How many tokens what stands in for unseen ones counts for, in the sums of an input."""
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

    def finish_(self, groups: list[list[str]]) -> None:
        """Sums to means, where they lie: they can take as much memory as the block. groups: see `pool_`."""
        self.pool_(groups)
        for sums in (self.moment, self.scale):
            for name, total in sums.items():
                total.div_(self.tokens[name] + self.prior.get(name, 0))

    def pool_(self, groups: list[list[str]]) -> None:
        """What stands in for the tokens that experts never saw, once all are seen. groups: `experts.groups` of the block."""
        for group in groups:
            owners = list(dict.fromkeys(self.source[n] for n in group if n in self.source))
            if not owners:
                raise InputError(f"no expert of block {self.block} was called on the calibration text ({group[0]}, ...)")
            pool, tokens = f"{owners[0]}, pooled", sum(self.tokens[n] for n in owners)
            if pool not in self.moment:  # up_proj is fed as gate_proj is
                H = torch.stack([self.moment[n] for n in owners]).sum(0) / tokens
                a = torch.stack([self.scale[n] for n in owners]).sum(0) / tokens
                if group[0].endswith(experts.INNER):
                    H, a = H.diagonal().mean() * torch.eye(len(H), device=H.device), torch.full_like(a, float(a.mean()))
                else:
                    self.prior |= dict.fromkeys(owners, len(a) / 4)
                for n in owners:
                    self.moment[n].add_(H, alpha=self.prior.get(n, 0))
                    self.scale[n].add_(a, alpha=self.prior.get(n, 0))
                self.moment[pool], self.scale[pool], self.tokens[pool], self.prior[pool] = H, a, 0, 1
            self.source |= {n: pool for n in group if n not in self.source}

    def take(self, matrix: str) -> Tensor:
        """H of a matrix's inputs, (columns, columns); once for every matrix, for it is forgotten with the last one fed by
        them."""
        owner = self.source.pop(matrix)
        return self.moment[owner] if owner in self.source.values() else self.moment.pop(owner)

    def tensors(self) -> dict[str, Tensor]:
        """`H.<i>`, `a.<i>` of every input i that is used, `source.<matrix>` -> i, and `tokens.<matrix>`."""
        names = sorted(set(self.source.values()))
        out = {f"source.{m}": torch.tensor(names.index(s)) for m, s in self.source.items()}
        out |= {f"tokens.{m}": torch.tensor(self.tokens[s]) for m, s in self.source.items()}
        for i, n in enumerate(names):
            out[f"H.{i}"], out[f"a.{i}"] = self.moment[n].cpu(), self.scale[n].cpu()
        return out


@contextmanager
def _watch_gradients(block: nn.Module, total: dict[str, Tensor], tokens: dict[str, int]) -> Iterator[None]:
    """Adds the sum over tokens of (dS/dy)^2 of each linear layer to `total`, and their number to `tokens`."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def see(_: nn.Module, __: tuple[Tensor, ...], y: Tensor) -> None:
            def add(gradient: Tensor) -> None:
                squares = gradient.float().square().flatten(0, -2)
                total[name] = total.get(name, 0) + squares.sum(0)
                tokens[name] = tokens.get(name, 0) + len(squares)

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
    `source.<matrix>` -> i, `tokens.<matrix>`, how many tokens it was called on, and `g.<matrix>`. Raises InputError on NaN
    or Inf activations, with the matrix's name.
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
        inputs.finish_(experts.groups(block))
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
    tokens: dict[str, int] = {}
    below = torch.empty_like(gradient)
    with walk.block(index) as block, _watch_gradients(block, total, tokens):
        for j, h in enumerate(hidden):
            leaf = h[None].to(walk.device).requires_grad_()
            out = walk.run(index, block, leaf)
            (g,) = torch.autograd.grad(out, leaf, gradient[j][None].to(walk.device))
            below[j] = g[0].cpu()
        layers = linears(block)
        for group in experts.groups(block):
            called = [n for n in group if n in total]
            level = sum(float(total[n].mean()) for n in called) / sum(tokens[n] for n in called)
            total |= {n: torch.full((layers[n].out_features,), level) for n in group if n not in total}
    return {f"g.{k}": v.cpu() for k, v in total.items()} | {"gradient": below}
