"""Spending a budget of bytes: which width each unit gets.

Every allocator is a function `(problem, generator) -> choice` that never exceeds the budget and leaves less of it
unused than one unit's next step up would take. `ALLOCATORS` is the list; PPO joins it behind the same signature.

Notation: D (units, widths) distortion in nats; B (units, widths) bytes, both with columns ordered as WIDTHS; a choice
is the column index of every unit, (units,) int64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from windquant.errors import InputError
from windquant.grids import WIDTHS


@dataclass(frozen=True)
class Target:
    """target_bits: effective bits of the body, every stored byte counted. target_size: bytes of the whole model file
    (`80MB`, `76MiB`); when given it takes the place of target_bits. embedding_bits: 8 or 4 packs the embedding and the head
    as well, None leaves them at 16; target_size counts them either way.
    """

    target_bits: float = 2.25
    target_size: str | None = None
    embedding_bits: Literal[4, 8] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.target_bits <= 16.5:
            raise InputError(f"target_bits {self.target_bits:g} is not a number of bits between 0 and 16.5")
        if self.target_size is not None:
            parse_size(self.target_size)


_SIZE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_size(text: str) -> int:
    """`80MB` or `76.3 MiB` -> bytes. Raises InputError with the accepted spellings."""
    number = text.rstrip("BKMGi").strip()
    unit = text[len(text.rstrip("BKMGi")) :]
    try:
        size = float(number) * _SIZE_UNITS[unit]
    except (KeyError, ValueError):
        raise InputError(f"target_size '{text}' is not a size; write a number and one of {', '.join(_SIZE_UNITS)}") from None
    if not 0 < size < float("inf"):
        raise InputError(f"target_size '{text}' is not above zero")
    return int(size)


@dataclass(frozen=True)
class Problem:
    """D, B as in the module's notation, and the budget in bytes.

    Raises InputError on NaN or negative distortions, and when not even the narrowest plan fits the budget.
    """

    D: Tensor
    B: Tensor
    budget: int

    def __post_init__(self) -> None:
        if not bool(torch.isfinite(self.D).all()) or bool((self.D < 0).any()):
            raise InputError("the distortion table holds NaN, Inf or negative entries; run the sensitivity stage again")
        floor = int(self.B.amin(-1).sum())
        if floor > self.budget:
            raise InputError(f"a budget of {self.budget} bytes is below the narrowest plan's {floor}; raise the target")

    def size(self, choice: Tensor) -> int:
        return int(self.B.gather(1, choice[:, None]).sum())

    def distortion(self, choice: Tensor) -> float:
        return float(self.D.gather(1, choice[:, None]).sum())


Allocator = Callable[[Problem, torch.Generator], Tensor]


def _raise(problem: Problem, choice: Tensor, order: Tensor, step: int = 1) -> Tensor:
    """One pass over the units in `order`: each goes `step` widths up if the budget still admits it."""
    choice, left = choice.clone(), problem.budget - problem.size(choice)
    top = len(WIDTHS) - 1
    B, chosen = problem.B.tolist(), choice.tolist()
    for u in order.tolist():
        up = min(chosen[u] + step, top)
        cost = B[u][up] - B[u][chosen[u]]
        if up > chosen[u] and cost <= left:
            chosen[u], left = up, left - cost
    return torch.tensor(chosen)


def fill(problem: Problem, choice: Tensor, order: Tensor) -> Tensor:
    """Passes over the units in `order`, one width up each, until no step fits any more."""
    while not torch.equal(raised := _raise(problem, choice, order), choice):
        choice = raised
    return choice


def widest_uniform(problem: Problem) -> int:
    """Index of the widest width that fits when every unit takes it."""
    total = problem.B.sum(0)
    return int((total <= problem.budget).nonzero().max())


def uniform(problem: Problem, generator: torch.Generator) -> Tensor:
    """One width everywhere; what it leaves of the budget lifts every n-th unit one width, evenly through the model.

    It uses no knowledge of the model, and all of the budget: the baseline at equal bytes.
    """
    base = widest_uniform(problem)
    n = len(problem.B)
    choice = torch.full((n,), base)
    if base == len(WIDTHS) - 1:
        return choice
    share = (problem.budget - problem.size(choice)) / int((problem.B[:, base + 1] - problem.B[:, base]).sum())
    position = (torch.arange(1, n + 1, dtype=torch.float64) * share).floor()
    lifted = position > (torch.arange(n, dtype=torch.float64) * share).floor()
    order = torch.cat([lifted.nonzero()[:, 0], (~lifted).nonzero()[:, 0]])
    return fill(problem, choice, order)


def random(problem: Problem, generator: torch.Generator) -> Tensor:
    """From the narrowest width, random units go one width up, round after round, until nothing fits."""
    choice = torch.zeros(len(problem.B), dtype=torch.int64)
    while True:
        order = torch.randperm(len(problem.B), generator=generator)
        keep = torch.rand(len(order), generator=generator) < 0.5
        raised = _raise(problem, choice, order[keep])
        if torch.equal(raised, choice):
            return fill(problem, choice, order)
        choice = raised


def sensitivity_rank(problem: Problem, generator: torch.Generator) -> Tensor:
    """The usual heuristic: units ranked by their distortion per byte at the widest uniform width, the most sensitive
    raised two widths, then one, until the budget is spent."""
    base = widest_uniform(problem)
    choice = torch.full((len(problem.B),), base)
    order = (problem.D[:, base] / problem.B[:, base]).argsort(descending=True, stable=True)
    return fill(problem, _raise(problem, choice, order, 2), order)


def at_price(problem: Problem, p: float) -> Tensor:
    """argmin over each unit of D + p B."""
    return (problem.D.double() + p * problem.B.double()).argmin(1)


def price(problem: Problem) -> float:
    """The lowest price p, nats a byte, at which argmin D + p B keeps the budget (Everett 1963: it is optimal among all
    plans of its own size)."""
    B = problem.B.double()
    low, high = 1e-40, float(problem.D.max() / (B[:, 1:] - B[:, :-1]).abs().clamp_min(1).min()) + 1.0
    if problem.size(at_price(problem, low)) <= problem.budget:
        return low
    for _ in range(200):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if problem.size(at_price(problem, middle)) <= problem.budget else (middle, high)
        if high <= low * (1 + 1e-14):
            break
    return high


def lagrangian(problem: Problem, generator: torch.Generator) -> Tensor:
    """argmin over each unit of D + p B at the `price` of the budget; what that leaves is spent greedily."""
    return _spend(problem, at_price(problem, price(problem)))


def _spend(problem: Problem, choice: Tensor) -> Tensor:
    """Greedy: the affordable change of one unit's width with the largest gain per byte, until none is left."""
    choice = choice.clone()
    left = problem.budget - problem.size(choice)
    gain = problem.D.double().gather(1, choice[:, None]) - problem.D.double()
    cost = problem.B - problem.B.gather(1, choice[:, None])
    while True:
        rate = torch.where((gain > 0) & (cost > 0) & (cost <= left), gain / cost.clamp_min(1), 0.0)
        best = int(rate.argmax())
        if rate.flatten()[best] <= 0:
            return choice
        u, b = divmod(best, rate.shape[1])
        left -= int(cost[u, b])
        choice[u] = b
        gain[u] = problem.D[u, b].double() - problem.D[u].double()
        cost[u] = problem.B[u] - problem.B[u, b]


ALLOCATORS: dict[str, Allocator] = {
    "uniform": uniform,
    "random": random,
    "sensitivity-rank": sensitivity_rank,
    "lagrangian": lagrangian,
}
