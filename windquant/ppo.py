"""Proximal policy optimisation with masked actions (Schulman et al., arXiv 1707.06347), for `environment`.

Ours because the policy is: it starts as the lagrangian allocator, softened by a temperature, and learns where that is wrong,

    logits = -e^k (e^h D + p B) / (tau unit) + g

k, h and g (one a width) come from a network of the state whose last layer starts at zero: h says that distortions at a
width count for more or less here, k how sure to be, g what widths to like whatever the table says. So the warm start needs
no cloning.

Notation: T steps of E episodes side by side; r rewards; V values; A advantages; R returns; pi probabilities.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windquant.errors import above_zero, between_0_and_1
from windquant.grids import WIDTHS


@dataclass(frozen=True)
class PPOConfig:
    """epochs over a rollout, lr of Adam: WINDQuant's. clip: of the ratio of probabilities. gamma, lam: of GAE. entropy,
    value: weights of their losses. minibatch: steps. target_kl: an update ends when the policy has moved so far.
    temperature: tau."""

    epochs: int = 3
    lr: float = 2e-3
    clip: float = 0.2
    gamma: float = 0.0
    lam: float = 0.0
    entropy: float = 1e-3
    value: float = 0.5
    minibatch: int = 1024
    target_kl: float = 0.1
    temperature: float = 0.02

    def __post_init__(self) -> None:
        above_zero(self, "epochs", "lr", "clip", "minibatch", "target_kl", "temperature")
        between_0_and_1(self, "gamma", "lam")


class Policy(nn.Module):
    """state (n, 15), table (n, 2, widths: D and p B in units of a mean distortion), mask (n, widths) -> logits (n, widths),
    masked ones -inf; and V (n,)."""

    def __init__(self, states: int, temperature: float, hidden: int = 64) -> None:
        super().__init__()
        self.temperature = temperature
        self.actor, self.critic = _mlp(states, hidden, 1 + 2 * len(WIDTHS)), _mlp(states, hidden, 1)

    def forward(self, state: Tensor, table: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        k, h, g = self._split(state)
        D, pB = table.unbind(1)
        logits = g - k.exp() * (h.exp() * D + pB) / self.temperature
        return logits.masked_fill(~mask, float("-inf")), self.critic(state).squeeze(-1)

    def distortions(self, state: Tensor, D: Tensor) -> Tensor:
        """(n, widths), not below 0: the distortions of which, priced with p B, these logits are the softmax. D: in units of
        a mean distortion."""
        k, h, g = (t.to(D.dtype) for t in self._split(state))
        own = h.exp() * D - self.temperature * (-k).exp() * g
        return own - own.amin(-1, keepdim=True)

    def _split(self, state: Tensor) -> tuple[Tensor, ...]:
        return self.actor(state).split((1, len(WIDTHS), len(WIDTHS)), -1)


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    last = nn.Linear(hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), last)


def log_probabilities(logits: Tensor) -> Tensor:
    """log pi of all actions; of masked ones the lowest finite number, whose pi is zero."""
    return logits.log_softmax(-1).clamp_min(torch.finfo(logits.dtype).min)


def gae(r: Tensor, V: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimates (arXiv 1506.02438) of whole episodes, (T, E). r, V: (T, E); after the last step V is
    zero."""
    A, following, value = torch.empty_like(r), torch.zeros_like(r[0]), torch.zeros_like(r[0])
    for t in range(len(r) - 1, -1, -1):
        delta = r[t] + gamma * value - V[t]
        following = delta + gamma * lam * following
        A[t], value = following, V[t]
    return A


def clipped_loss(log_pi: Tensor, old_log_pi: Tensor, A: Tensor, clip: float) -> Tensor:
    """-mean min(ratio A, clipped ratio A)."""
    ratio = (log_pi - old_log_pi).exp()
    return -torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A).mean()


@dataclass
class Rollout:
    """T x E steps, flattened: state, table and mask as `Policy` takes them, actions, log_pi of them and V when they were
    taken, A and R."""

    state: Tensor
    table: Tensor
    mask: Tensor
    actions: Tensor
    log_pi: Tensor
    V: Tensor
    A: Tensor
    R: Tensor

    def minibatches(self, size: int, generator: torch.Generator) -> Iterator["Rollout"]:
        for picked in torch.randperm(len(self.actions), generator=generator).split(size):
            yield Rollout(*(t[picked] for t in vars(self).values()))


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, rollout: Rollout, config: PPOConfig, generator: torch.Generator
) -> dict[str, float]:
    """Some epochs over a rollout. Returns entropy, KL (of the policy before from the one after, as estimated by
    ratio - 1 - log ratio), clip_fraction and explained_variance (of R by V), means over the minibatches."""
    found: list[list[float]] = []
    for _ in range(config.epochs):
        for b in rollout.minibatches(config.minibatch, generator):
            logits, V = policy(b.state, b.table, b.mask)
            log_all = log_probabilities(logits)
            log_pi = log_all.gather(1, b.actions[:, None]).squeeze(1)
            entropy = -(log_all.exp() * log_all).sum(-1).mean()
            A = (b.A - b.A.mean()) / (b.A.std(correction=0) + 1e-8)
            loss = clipped_loss(log_pi, b.log_pi, A, config.clip)
            loss = loss + config.value * (V - b.R).square().mean() - config.entropy * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            with torch.no_grad():
                log_ratio = log_pi - b.log_pi
                kl = (log_ratio.exp() - 1 - log_ratio).mean()
                clipped = ((log_ratio.exp() - 1).abs() > config.clip).float().mean()
            found.append([float(entropy.detach()), float(kl), float(clipped)])
        if found[-1][1] > config.target_kl:
            break
    means = torch.tensor(found).mean(0).tolist()
    explained = 1 - (rollout.R - rollout.V).var(correction=0) / rollout.R.var(correction=0).clamp_min(1e-12)
    return dict(zip(("entropy", "kl", "clip_fraction"), means, strict=True)) | {"explained_variance": float(explained)}
