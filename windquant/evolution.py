"""Plans by mutation and selection on the true loss, in the manner of EvoPress (Sieberling et al., arXiv 2410.14649): what a
search without a model of the problem finds with as many true losses as PPO is given.

One parent; offspring by level switches, as many units up a width as it takes units down to pay for them; the best of parent
and offspring is the next parent. Ours beside the paper's: thousands of units here in place of its tens of layers, so the
number of switches is drawn log-uniformly up to a tenth of the units, not one to three; and it starts from the lagrangian
plan, as PPO does.
"""

import torch
from torch import Tensor

from windquant.allocate import Problem, fill, lagrangian
from windquant.calibrate import Report
from windquant.grids import WIDTHS
from windquant.search import Counted

IN_VAIN = 100
"""So many generations of plans that were all known end the search: a small problem has no others."""


def evolution(
    problem: Problem, loss: Counted, evaluations: int, offspring: int, generator: torch.Generator, report: Report
) -> Tensor:
    """The best plan found with so many true losses besides that of the plan it starts from, (units,)."""
    parent = lagrangian(problem, generator)
    best, start, in_vain = float(loss(parent[None])), len(loss.known), 0
    while (left := evaluations - (len(loss.known) - start)) > 0 and in_vain < IN_VAIN:
        in_vain += 1
        children = torch.stack([mutate(problem, parent, generator) for _ in range(min(offspring, left))])
        known, losses = len(loss.known), loss(children)
        in_vain = 0 if len(loss.known) > known else in_vain
        if float(losses.min()) < best:
            parent, best = children[losses.argmin()], float(losses.min())
        report(evaluations - left + len(children), evaluations)
    return parent


def mutate(problem: Problem, choice: Tensor, generator: torch.Generator) -> Tensor:
    """Some units a width up, others down until the budget holds, what is left spent at random."""
    units, top = len(choice), len(WIDTHS) - 1
    largest = max(units / 10, 1.0)
    switches = max(1, round(float(largest ** torch.rand((), generator=generator))))
    order = torch.randperm(units, generator=generator)
    up = order[:switches]
    choice = choice.clone()
    choice[up] = (choice[up] + 1).clamp_max(top)
    excess = problem.size(choice) - problem.budget
    for u in order.roll(-switches).tolist():  # those that went up come last, when no other unit can pay
        if excess <= 0:
            break
        if choice[u] > 0:
            excess -= int(problem.B[u, choice[u]] - problem.B[u, choice[u] - 1])
            choice[u] -= 1
    return fill(problem, choice, torch.randperm(units, generator=generator))
