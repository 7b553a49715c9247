"""PPO against true losses: which plan is best once everything has been rounded together.

The true loss of a plan comes once an episode, after thousands of actions; the distortion table says at once what each
action costs, wrongly. `correction` turns the losses so far into a better table, and step rewards are that one's. The policy
sees the table as it is, so what it learns it learns of the state, and takes along to other budgets and models.

What chance a policy needs to find something new lies in the features of the correction, not in single units, whose noise
would cost more than there is to gain (benchmarks/LOG.md): every episode is shown a table of its own, its groups made dearer
or cheaper. The policy plays it at a low temperature, at the price p of bytes at which its own distortions keep the budget:
the budget's multiplier, solved for every episode. True losses are asked for the policy's own plan, for that of the
corrected table and others near it, and for one of the rollout's; all episodes teach.

The multiplier of quality, mu, follows the measured degradation: up while the plans' mean loss is above what is aimed at,
down below it; step rewards are -(mu D + p (B - B at 2 bits)). The budget is hard, and p solved for: it rises with mu, so
that mu weighs rewards against the bonus of entropy, and buys no bits that are not there.

Notation: D, B, p as in `environment`; f (units, features) as in `correction`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windquant import ppo
from windquant.allocate import Problem, lagrangian, price
from windquant.correction import correct
from windquant.environment import CONTEXT, STATIC, Environment
from windquant.errors import InputError, above_zero
from windquant.ppo import Policy, PPOConfig, Rollout

Loss = Callable[[Tensor], Tensor]
"""Choices (n, units) -> true losses in nats a token, (n,) float64."""


@dataclass(frozen=True)
class SearchConfig:
    """episodes in all, 0 to take a policy as it is; batch of them a rollout. losses: plans a rollout whose true loss is
    asked for, at least 2. explore: standard deviation of the logarithm of what an episode's table is multiplied with,
    feature by feature. depths: tents over the depth."""

    episodes: int = 200
    batch: int = 25
    losses: int = 6
    explore: float = 0.3
    depths: int = 4

    @property
    def rollouts(self) -> int:
        return -(-self.episodes // self.batch)

    def __post_init__(self) -> None:
        above_zero(self, "batch", "losses", "depths")
        for name in ("episodes", "explore"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} {getattr(self, name):g} is below 0")


class Counted:
    """A loss that is never asked twice for the same plan. known: losses by plans, each a byte a unit."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.known: dict[bytes, float] = {}

    def __call__(self, choices: Tensor) -> Tensor:
        keys = [key(c) for c in choices]
        new = {k: c for k, c in zip(keys, choices, strict=True) if k not in self.known}
        if new:
            found = self.loss(torch.stack(list(new.values())))
            if not bool(torch.isfinite(found).all()):
                raise InputError("the true loss of a plan is NaN or Inf")
            self.known |= dict(zip(new, found.tolist(), strict=True))
        return torch.tensor([self.known[k] for k in keys], dtype=torch.float64)

    def best(self, n: int) -> tuple[Tensor, Tensor]:
        """Of the plans asked for the n with the least losses, best first: choices (n, units) and losses."""
        keys = sorted(self.known, key=self.known.__getitem__)[:n]
        return torch.stack([_choice(k) for k in keys]), torch.tensor([self.known[k] for k in keys], dtype=torch.float64)

    def all(self) -> tuple[Tensor, Tensor]:
        """Choices (N, units) and losses, in the order they were asked for."""
        return torch.stack([_choice(k) for k in self.known]), torch.tensor(list(self.known.values()), dtype=torch.float64)

    def state(self) -> dict[str, Tensor]:
        choices, losses = self.all()
        return {"known": choices.to(torch.uint8), "known_losses": losses}

    def load(self, state: dict[str, Tensor]) -> None:
        self.known = dict(zip(map(key, state["known"]), state["known_losses"].tolist(), strict=True))


def key(choice: Tensor) -> bytes:
    """A plan as a byte a unit."""
    return choice.to(torch.uint8).numpy().tobytes()


def _choice(key: bytes) -> Tensor:
    return torch.frombuffer(bytearray(key), dtype=torch.uint8).long()


class Search:
    """A search for the best plan of a problem. static: (units, len(STATIC)) standardised; f: `correction.features`. start:
    the policy of the curriculum's stage before, or of another model. aim: the loss that mu is steered by.

    `rollout` plays a batch of episodes and learns from them; `state` and `load` keep everything between two of them, so that
    an interrupted search goes on to the same result.
    """

    def __init__(
        self,
        problem: Problem,
        static: Tensor,
        f: Tensor,
        loss: Loss,
        config: SearchConfig,
        learning: PPOConfig,
        seed: int,
        start: Policy | None = None,
        aim: float | None = None,
    ) -> None:
        self.problem, self.static, self.f, self.config, self.learning = problem, static, f, config, learning
        self.loss, self.aim, self.mu, self.episodes = Counted(loss), aim, 1.0, 0
        self.generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy = Policy(len(STATIC) + len(CONTEXT), learning.temperature)
        if start is not None:
            self.policy.load_state_dict(start.state_dict())
            self.policy.temperature = start.temperature
        self.optimizer = torch.optim.Adam(self.policy.parameters(), learning.lr)
        self.first = lagrangian(problem, self.generator)
        self.first_loss = float(self.loss(self.first[None]))
        self.along = states_along(problem, static, self.first)
        self.unit = self._environment(1).unit

    def state(self) -> dict[str, Tensor]:
        """All that `load` needs to go on, as tensors."""
        moments = self.optimizer.state_dict()["state"]
        return {
            **{f"policy.{name}": t.clone() for name, t in self.policy.state_dict().items()},
            **{f"adam.{i}.{name}": t.clone() for i, kept in moments.items() for name, t in kept.items()},
            **self.loss.state(),
            "generator": self.generator.get_state(),
            "mu": torch.tensor(self.mu, dtype=torch.float64),
            "episodes": torch.tensor(self.episodes),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave, of a search with the same problem and settings."""
        self.policy.load_state_dict({n.removeprefix("policy."): t for n, t in state.items() if n.startswith("policy.")})
        moments: dict[int, dict[str, Tensor]] = {}
        for _, i, name in (key.split(".", 2) for key in state if key.startswith("adam.")):
            moments.setdefault(int(i), {})[name] = state[f"adam.{i}.{name}"].clone()
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})
        self.loss.load(state)
        self.mu, self.episodes = float(state["mu"]), int(state["episodes"])
        self.generator.set_state(state["generator"])

    def corrected(self) -> Problem:
        """The problem with what the losses so far say of its table."""
        return Problem(correct(self.problem.D, self.f, *self.loss.all()), self.problem.B, self.problem.budget)

    def rollout(self) -> dict[str, float]:
        """One batch of episodes, true losses of some of their plans, and what PPO makes of them. Returns figures to log."""
        E = min(self.config.batch, self.config.episodes - self.episodes)
        if E < 1:
            raise InputError(f"all {self.config.episodes} episodes are played")
        steps, choice = self._play(self._factors(E))
        self.episodes += E
        losses = self.loss(self._asked(choice))
        if self.aim is not None:
            self.mu = min(max(self.mu * math.exp(float(losses.mean()) - self.aim), 0.25), 4.0)
        stats, terms = self._learn(steps, choice)
        known = self.loss.all()[1]
        used = self.problem.B.gather(1, choice.T).sum(0).double().mean() / self.problem.budget
        figures = {
            "episodes": self.episodes,
            "evaluations": len(known),
            "best_loss": known.min(),
            "policy_loss": losses[0],
            "corrected_loss": losses[1],
            "mean_loss": losses.mean(),
            "budget_used": used,
            "mu": self.mu,
        }
        # Sums differ in their last digits with where a tensor lies in memory.
        return {name: float(f"{float(value):.9g}") for name, value in (figures | terms | stats).items()}

    def _factors(self, n: int) -> Tensor:
        """(units, n): what n tables are to be multiplied with, groups made dearer or cheaper at random."""
        random = torch.randn(self.f.shape[1], n, generator=self.generator, dtype=torch.float64)
        return (self.config.explore * self.f @ random).exp()

    def _asked(self, choice: Tensor) -> Tensor:
        """Plans whose true losses are worth most: the policy's own, that of the corrected table, from three on one of the
        rollout's, and others of corrected tables with their groups made dearer or cheaper once more, which are near the best
        one known."""
        corrected = self.corrected()
        plans = [self.plan(), lagrangian(corrected, self.generator), choice[0]]
        while len(plans) < self.config.losses:
            plans.append(lagrangian(replace(corrected, D=corrected.D * self._factors(1)), self.generator))
        return torch.stack(plans[: max(2, self.config.losses)])

    @torch.no_grad()
    def seen(self, factors: Tensor | float = 1.0) -> Problem:
        """The problem as the policy sees it, shown a table multiplied by factors (units, 1)."""
        D = self.policy.distortions(self.along, self.problem.D.double() * factors / self.unit) * self.unit
        return Problem(D, self.problem.B, self.problem.budget)

    def plan(self) -> Tensor:
        """What the policy prefers, as a whole: the lagrangian plan of the distortions that its logits stand for."""
        return lagrangian(self.seen(), self.generator)

    def _environment(self, episodes: int) -> Environment:
        return Environment(self.problem, self.static, episodes, price(self.problem))

    def _play(self, factors: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Every step's tensors (T, E, ...), and the finished choices. factors: (units, E), of the table that each episode is
        shown."""
        env = self._environment(factors.shape[1])
        shown = self.problem.D.double()[:, None] * factors[:, :, None] / env.unit
        prices = torch.tensor([price(self.seen(of_episode)) for of_episode in factors.T[:, :, None]])
        priced = prices[:, None] * (env.B - env.two[:, None]).double()[:, None] / env.unit
        tables = torch.stack([shown, priced], 2).float()
        state, info = env.reset()
        kept: dict[str, list[Tensor]] = {name: [] for name in ("state", "table", "mask", "actions", "log_pi", "V")}
        with torch.no_grad():
            for table in tables:
                seen, mask = torch.as_tensor(state), torch.as_tensor(info["mask"])
                logits, V = self.policy(seen, table, mask)
                log_all = ppo.log_probabilities(logits)
                actions = torch.multinomial(log_all.exp(), 1, generator=self.generator)
                found = (seen, table, mask, actions[:, 0], log_all.gather(1, actions)[:, 0], V)
                for values, tensor in zip(kept.values(), found, strict=True):
                    values.append(tensor)
                state, _, _, _, info = env.step(actions[:, 0])
        return {name: torch.stack(values) for name, values in kept.items()}, env.choice

    def _learn(self, steps: dict[str, Tensor], choice: Tensor) -> tuple[dict[str, float], dict[str, float]]:
        """PPO's figures, and the terms of an episode's reward, means over the episodes."""
        problem = self.corrected()
        env = Environment(problem, self.static, 1, self.mu * price(problem), self.mu)
        r = env.rewards.gather(1, choice.T).float()
        beyond = (problem.B.gather(1, choice.T) - env.two[:, None]).sum(0).double().mean()
        A = ppo.gae(r, steps["V"], self.learning.gamma, self.learning.lam)
        flat = {name: t.flatten(0, 1) for name, t in (steps | {"A": A, "R": A + steps["V"]}).items()}
        terms = {
            "reward": float(r.sum(0).mean()),
            "reward_quality": float(-self.mu * problem.D.gather(1, choice.T).sum(0).mean() / env.unit),
            "reward_bits": float(-env.price * beyond / env.unit),
        }
        learning = replace(self.learning, entropy=self.learning.entropy / self.mu)  # for advantages are standardised
        return ppo.update(self.policy, self.optimizer, Rollout(**flat), learning, self.generator), terms


def states_along(problem: Problem, static: Tensor, choice: Tensor) -> Tensor:
    """(units, 15) float32: the state of every unit when its turn comes, in an episode that makes this choice."""
    env = Environment(problem, static, 1, 0.0)
    state, _ = env.reset()
    out = []
    for action in choice:
        out.append(torch.as_tensor(state)[0])
        env.admitted.fill_(True)  # a lagrangian plan may leave more of the budget unused than a policy may
        state, *_ = env.step(action[None])
    return torch.stack(out)
