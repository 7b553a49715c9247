"""PPO against true losses: which plan is best once everything has been rounded together.

The true loss of a plan comes once an episode, after thousands of actions; the distortion table says at once what each action
costs, wrongly. What it gets wrong is mostly common to a kind of matrix and a depth. So an episode's loss is decomposed
(Arjona-Medina et al., arXiv 1806.07857, redistribute returns; here by ridge regression, a dozen numbers for a few hundred
losses): with X_ng = sum of psi_ug D over the units of plan n,

    loss_n = b + sum_g (1 + theta_g) X_ng,   theta pulled to 0,

and the step reward is that of the table times 1 + psi theta. Groups are kinds of matrix times tents over the depth. The
policy sees the table as it is, so what it learns it learns of the state, and takes along to other budgets and models.
Exploration is in the groups' directions, too: every episode is shown a table of its own, its groups made dearer or cheaper
by chance.

The budget's multiplier p is the lagrangian's price for the corrected table. The multiplier of quality, mu, follows the
measured degradation: up while the plans' mean loss is above what is aimed at, down below it; it weighs distortions against
bits.

Notation: D, B, p as in `environment`; psi (units, groups); N plans seen, choices (N, units), losses (N,).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windquant import ppo
from windquant.allocate import Problem, lagrangian, price
from windquant.environment import CONTEXT, STATIC, Environment
from windquant.errors import InputError
from windquant.grids import WIDTHS
from windquant.ppo import Policy, PPOConfig, Rollout
from windquant.units import Unit

Loss = Callable[[Tensor], Tensor]
"""Choices (n, units) -> true losses in nats a token, (n,) float64."""


@dataclass(frozen=True)
class SearchConfig:
    """episodes in all; batch of them a rollout. explore: standard deviation of the logarithm of what an episode's table is
    multiplied with, group by group. depths: tents over the depth. ridge: what of the first plan's distortion the
    decomposition is thought to miss of a loss; the larger, the harder is theta pulled to 0."""

    episodes: int = 200
    batch: int = 8
    explore: float = 0.3
    depths: int = 4
    ridge: float = 0.05

    def __post_init__(self) -> None:
        for name in ("episodes", "batch", "depths", "ridge"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} {getattr(self, name):g} is not above 0")
        if self.explore < 0:
            raise InputError(f"explore {self.explore:g} is below 0")


def groups(body: Sequence[Unit], depths: int) -> Tensor:
    """psi, (units, kinds x depths) float64; a unit's row adds up to 1."""
    kinds = list(dict.fromkeys(u.matrix.kind for u in body))
    last = max(max(u.matrix.block for u in body), 1)
    psi = torch.zeros(len(body), len(kinds), depths, dtype=torch.float64)
    for i, u in enumerate(body):
        at = u.matrix.block / last * (depths - 1)
        low = min(int(at), max(depths - 2, 0))
        row = psi[i, kinds.index(u.matrix.kind)]
        row[low] = 1 - (at - low)
        if depths > 1:
            row[low + 1] = at - low
    return psi.flatten(1)


class Counted:
    """A loss that is never asked twice for the same plan. known: losses by plans, each a byte a unit."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.known: dict[bytes, float] = {}

    def __call__(self, choices: Tensor) -> Tensor:
        keys = [c.to(torch.uint8).numpy().tobytes() for c in choices]
        new = {k: c for k, c in zip(keys, choices, strict=True) if k not in self.known}
        if new:
            found = self.loss(torch.stack(list(new.values())))
            if not bool(torch.isfinite(found).all()):
                raise InputError("the true loss of a plan is NaN or Inf")
            self.known |= dict(zip(new, found.tolist(), strict=True))
        return torch.tensor([self.known[k] for k in keys], dtype=torch.float64)

    def best(self) -> tuple[Tensor, float]:
        """Of the plans asked for that with the least loss, and that loss."""
        key = min(self.known, key=self.known.__getitem__)
        return torch.frombuffer(bytearray(key), dtype=torch.uint8).long(), self.known[key]

    def state(self) -> dict[str, Tensor]:
        plans = torch.frombuffer(bytearray(b"".join(self.known)), dtype=torch.uint8).view(len(self.known), -1)
        return {"known": plans, "known_losses": torch.tensor(list(self.known.values()), dtype=torch.float64)}

    def load(self, state: dict[str, Tensor]) -> None:
        plans = (c.numpy().tobytes() for c in state["known"])
        self.known = dict(zip(plans, state["known_losses"].tolist(), strict=True))


def correct(D: Tensor, psi: Tensor, choices: Tensor, losses: Tensor, noise: float) -> Tensor:
    """The corrected table (units, widths): D (1 + psi theta), no factor below a tenth. noise: standard deviation of what the
    decomposition misses of a loss, in nats; theta has the prior deviation 1."""
    chosen = D.double().gather(1, choices.T).T
    X = chosen @ psi
    size = X.mean(0)
    known = size > 0
    Z = X[:, known] - size[known]
    y = losses - losses.mean() - Z.sum(1)
    A = Z.T @ Z + noise**2 * torch.eye(int(known.sum()), dtype=torch.float64)
    theta = torch.zeros(psi.shape[1], dtype=torch.float64)
    theta[known] = torch.linalg.solve(A, Z.T @ y)
    return D.double() * (1 + psi @ theta).clamp_min(0.1)[:, None]


class Search:
    """A search for the best plan of a problem. static: (units, len(STATIC)) standardised; psi: `groups`.

    `rollout` plays a batch of episodes and learns from them; `state` and `load` keep everything between two of them, so that
    an interrupted search goes on to the same result.
    """

    def __init__(
        self,
        problem: Problem,
        static: Tensor,
        psi: Tensor,
        loss: Loss,
        config: SearchConfig,
        learning: PPOConfig,
        seed: int,
        target_loss: float | None = None,
    ) -> None:
        self.problem, self.static, self.psi, self.config, self.learning = problem, static, psi, config, learning
        self.loss, self.target_loss, self.mu, self.own_loss = Counted(loss), target_loss, 1.0, math.inf
        self.generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy = Policy(len(STATIC) + len(CONTEXT), learning.temperature)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), learning.lr)
        first = lagrangian(problem, self.generator)[None]
        self.choices, self.losses = first, self.loss(first)

    @property
    def episodes(self) -> int:
        return len(self.choices) - 1

    def state(self) -> dict[str, Tensor]:
        """All that `load` needs to go on, as tensors."""
        moments = self.optimizer.state_dict()["state"]
        return {
            **{f"policy.{name}": t.clone() for name, t in self.policy.state_dict().items()},
            **{f"adam.{i}.{name}": t.clone() for i, kept in moments.items() for name, t in kept.items()},
            **self.loss.state(),
            "choices": self.choices.to(torch.uint8),
            "losses": self.losses,
            "generator": self.generator.get_state(),
            "mu": torch.tensor(self.mu, dtype=torch.float64),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave, of a search with the same problem and settings."""
        self.policy.load_state_dict({n.removeprefix("policy."): t for n, t in state.items() if n.startswith("policy.")})
        moments: dict[int, dict[str, Tensor]] = {}
        for _, i, name in (key.split(".", 2) for key in state if key.startswith("adam.")):
            moments.setdefault(int(i), {})[name] = state[f"adam.{i}.{name}"].clone()
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})
        self.loss.load(state)
        self.choices, self.losses, self.mu = state["choices"].long(), state["losses"], float(state["mu"])
        self.generator.set_state(state["generator"])

    def corrected(self) -> Problem:
        """The problem with what the losses so far say of its table."""
        if len(self.choices) < 3:
            return self.problem
        noise = self.config.ridge * self.problem.distortion(self.choices[0])
        D = correct(self.problem.D, self.psi, self.choices, self.losses, noise)
        return Problem(D, self.problem.B, self.problem.budget)

    def rollout(self) -> dict[str, float]:
        """One batch of episodes, their true losses, and what PPO makes of them. Returns figures to log."""
        E = min(self.config.batch, self.config.episodes - self.episodes)
        if E < 1:
            raise InputError(f"all {self.config.episodes} episodes are played")
        factors = torch.randn(self.psi.shape[1], E, generator=self.generator, dtype=torch.float64)
        shown = (self.config.explore * self.psi @ factors).exp()
        shown[:, 0] = 1  # as it is
        steps, choice = self._play(shown, self._environment(E))
        losses = self.loss(choice)
        self.choices, self.losses = torch.cat([self.choices, choice]), torch.cat([self.losses, losses])
        if self.target_loss is not None:
            self.mu = min(max(self.mu * math.exp(float(losses.mean()) - self.target_loss), 0.25), 4.0)
        env = self._environment(1)
        stats = self._learn(steps, choice, env)
        own = self.plan(steps["state"].mean(1), env)[None]
        self.own_loss = float(self.loss(own))
        sizes = torch.stack([torch.tensor(self.problem.size(c)) for c in choice]).double()
        return {
            "episodes": float(self.episodes),
            "evaluations": float(len(self.loss.known)),
            "best_loss": self.loss.best()[1],
            "mean_loss": float(losses.mean()),
            "policy_loss": self.own_loss,
            "budget_used": float((sizes / self.problem.budget).mean()),
            "mu": self.mu,
        } | stats

    @torch.no_grad()
    def plan(self, state: Tensor, env: Environment) -> Tensor:
        """What the policy prefers, as a whole: the lagrangian plan of the distortions that its logits stand for. state:
        (units, 15), of every unit when its turn comes."""
        h, k, g = self.policy.actor(state).double().split((1, 1, len(WIDTHS)), -1)
        D = h.exp() * self.problem.D.double() - env.unit * self.learning.temperature * (-k).exp() * g
        problem = Problem(D - D.amin(1, keepdim=True), self.problem.B, self.problem.budget)
        return lagrangian(problem, self.generator)

    def _environment(self, episodes: int) -> Environment:
        """Of the corrected problem, at its price."""
        problem = self.corrected()
        return Environment(problem, self.static, episodes, price(problem))

    def _play(self, factors: Tensor, env: Environment) -> tuple[dict[str, Tensor], Tensor]:
        """Every step's tensors (T, E, ...), and the finished choices. factors: (units, E) on the table each episode is
        shown."""
        D, pB = self.problem.D.double() / env.unit, env.price * (env.B - env.two[:, None]).double() / env.unit
        state, info = env.reset()
        kept: dict[str, list[Tensor]] = {name: [] for name in ("state", "table", "mask", "actions", "log_pi", "V")}
        with torch.no_grad():
            for u in range(len(D)):
                seen, mask = torch.as_tensor(state), torch.as_tensor(info["mask"])
                table = torch.stack([D[u] * factors[u, :, None], pB[u].expand(env.num_envs, -1)], 1).float()
                logits, V = self.policy(seen, table, mask)
                log_all = ppo.log_probabilities(logits)
                actions = torch.multinomial(log_all.exp(), 1, generator=self.generator)
                found = (seen, table, mask, actions[:, 0], log_all.gather(1, actions)[:, 0], V)
                for values, tensor in zip(kept.values(), found, strict=True):
                    values.append(tensor)
                state, _, _, _, info = env.step(actions[:, 0])
        return {name: torch.stack(values) for name, values in kept.items()}, env.choice

    def _learn(self, steps: dict[str, Tensor], choice: Tensor, env: Environment) -> dict[str, float]:
        r = (self.mu * env.rewards if self.target_loss is not None else env.rewards).gather(1, choice.T).float()
        A = ppo.gae(r, steps["V"], self.learning.gamma, self.learning.lam)
        flat = {name: t.flatten(0, 1) for name, t in (steps | {"A": A, "R": A + steps["V"]}).items()}
        return ppo.update(self.policy, self.optimizer, Rollout(**flat), self.learning, self.generator)
