"""Allocation as a finite-horizon Markov decision process (WINDQuant, arXiv 2605.26660): one step, one unit, one width.

A batch of episodes walks through the units in the model's order. The state is 15 numbers in the paper's four groups; which
statistics they are the paper leaves open, so the choice is ours:

    weights      log10 of the mean |w|; log10 of the variance; sparsity, the share below a tenth of the mean |w|; outliers,
                 the share above four standard deviations
    calibration  log10 of the mean activation scale a = E|x|; log10 of its peak over its mean; log10 of the distortion D at
                 2 bits a weight; log10 of what remains of it at 3 bits
    structure    attention (1) or not (0); depth, first block 0 to last 1; log10 of a matrix's rows over its columns
    context      progress, units decided of all; budget, bytes left over what the rest takes at 2 bits; urgency, bytes left
                 above the narrowest plan of the rest, of the whole budget; spent, bytes so far over those of 2 bits

The first eleven do not change during an episode and are standardised over the units; a policy is saved with that `Standard`.

Actions are the columns of WIDTHS. Masked are those after which the rest would pass the budget even at its narrowest, or stay
below FILL of it even at its widest: a finished plan is feasible whatever the policy does.

Notation: D (units, widths) distortions in nats; B (units, widths) bytes; p nats a byte, the budget's Lagrange multiplier.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector.utils import batch_space
from torch import Tensor

from windquant.allocate import Problem
from windquant.errors import InputError
from windquant.features import FEATURES
from windquant.grids import WIDTHS
from windquant.units import Unit

STATIC = (*FEATURES, "log_distortion", "log_remaining", "attention", "depth", "log_aspect")
CONTEXT = ("progress", "budget", "urgency", "spent")
FILL = 0.995
"""Of the budget that every plan uses, where whole units admit it."""
_TINY = 1e-12


def static_state(body: Sequence[Unit], D: Tensor, own: Tensor) -> Tensor:
    """The static numbers of all units, (units, len(STATIC)), float64, not yet standardised. own: what `features` gives."""
    two, three = (D[:, WIDTHS.index(b)].double().clamp_min(_TINY) for b in (2, 3))
    last = max(max(u.matrix.block for u in body), 1)
    attention = [float("attn" in u.matrix.name or "attention" in u.matrix.name) for u in body]
    rest = [
        two.log10(),
        (three / two).log10(),
        torch.tensor(attention, dtype=torch.float64),
        torch.tensor([u.matrix.block / last for u in body], dtype=torch.float64),
        torch.tensor([u.matrix.rows / u.matrix.columns for u in body], dtype=torch.float64).log10(),
    ]
    return torch.cat([own.double(), torch.stack(rest, 1)], 1)


@dataclass(frozen=True)
class Standard:
    """Mean and standard deviation of the static numbers, (len(STATIC),) each; what does not vary has deviation 1."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, static: Tensor) -> "Standard":
        std = static.std(0, correction=0)
        return cls(static.mean(0), torch.where(std > 1e-6, std, 1.0))

    def __call__(self, static: Tensor) -> Tensor:
        return ((static - self.mean) / self.std).float()


class Environment(gym.vector.VectorEnv):
    """`episodes` plans made side by side. static: (units, len(STATIC)), standardised. price: p. loss: finished choices
    (episodes, units) -> their true losses in nats, (episodes,); None: no episode reward.

    Step reward, in units of the mean distortion of a unit in the lagrangian plan at p: -(mu D + p (B - B at 2 bits)),
    feasible bits saved or spent at their price, less what the best width would have brought, which says nothing of a policy
    but spares it the differences between units. Episode reward: -mu loss, in the same units. An episode ends with the last
    unit; `info["mask"]` says which actions the next step admits, `info["choice"]` of finished ones what was chosen.
    """

    def __init__(
        self, problem: Problem, static: Tensor, episodes: int, price: float, mu: float = 1.0,
        loss: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        units = len(problem.B)
        if static.shape != (units, len(STATIC)):
            raise InputError(f"the state of {units} units has the shape {tuple(static.shape)}, not {(units, len(STATIC))}")
        self.problem, self.static, self.price, self.mu, self.loss = problem, static, price, mu, loss
        self.num_envs = episodes
        self.single_observation_space = gym.spaces.Box(-float("inf"), float("inf"), (len(STATIC) + len(CONTEXT),))
        self.single_action_space = gym.spaces.Discrete(len(WIDTHS))
        self.observation_space = batch_space(self.single_observation_space, episodes)
        self.action_space = batch_space(self.single_action_space, episodes)
        self.B = problem.B.long()
        self.two = self.B[:, WIDTHS.index(2)]
        self.floor, self.ceiling, self.rest = (_from_here(t) for t in (self.B.amin(1), self.B.amax(1), self.two))
        priced = mu * problem.D.double() + price * (self.B - self.two[:, None])
        best = (problem.D.double() + price * self.B).argmin(1, keepdim=True)
        self.unit = float(problem.D.double().gather(1, best).mean().clamp_min(_TINY))
        self.rewards = (priced.amin(1, keepdim=True) - priced) / self.unit

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        self.left = torch.full((self.num_envs,), self.problem.budget)
        self.choice = torch.empty(self.num_envs, len(self.B), dtype=torch.int64)
        self.admitted = self._mask()
        return self.state().numpy(), {"mask": self.admitted.numpy()}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        actions = torch.as_tensor(actions)
        if not bool(self.admitted.gather(1, actions[:, None]).all()):
            raise InputError(f"unit {self.at}: a masked width was chosen")
        self.choice[:, self.at] = actions
        self.left = self.left - self.B[self.at, actions]
        reward = self.rewards[self.at, actions]
        self.at += 1
        done = self.at == len(self.B)
        info: dict[str, Any] = {}
        if done:
            info["choice"] = self.choice.numpy()
            if self.loss is not None:
                info["loss"] = self.loss(self.choice).numpy()
                reward = reward - self.mu * torch.as_tensor(info["loss"]) / self.unit
        else:
            self.admitted = self._mask()
            info["mask"] = self.admitted.numpy()
        ends = torch.full((self.num_envs,), done).numpy()
        return self.state().numpy(), reward.numpy(), ends, (ends & False), info

    def _mask(self) -> Tensor:
        """(episodes, widths) bool, the actions that keep the plan feasible. Where none does, for units are whole, the widest
        that the budget still admits."""
        after = self.left[:, None] - self.B[self.at]
        fits = after >= self.floor[self.at + 1]
        fills = after <= self.ceiling[self.at + 1] + (1 - FILL) * self.problem.budget
        both = fits & fills
        widest = torch.where(fits, self.B[self.at], -1).argmax(1, keepdim=True)
        return torch.where(both.any(1, keepdim=True), both, torch.zeros_like(both).scatter(1, widest, True))

    def state(self) -> Tensor:
        """(episodes, 15) float32; of a finished episode the last unit's."""
        at, n, budget = min(self.at, len(self.B) - 1), len(self.B), self.problem.budget
        rest = self.rest[self.at].clamp_min(1)
        spent = (budget - self.left) / (self.rest[0] - self.rest[self.at]).clamp_min(1)
        context = [
            torch.full_like(spent, self.at / n),
            self.left / rest,
            (self.left - self.floor[self.at]) / budget,
            spent,
        ]
        own = self.static[at].expand(self.num_envs, -1)
        return torch.cat([own, torch.stack(context, 1).float()], 1)


def _from_here(sizes: Tensor) -> Tensor:
    """Sums of a unit and all after it, one zero more at the end: (units + 1,)."""
    return torch.cat([sizes.flip(0).cumsum(0).flip(0), sizes.new_zeros(1)])
