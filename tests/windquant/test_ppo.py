import math

import gymnasium as gym
import pytest
import torch

from windquant import ppo
from windquant.ppo import Policy, PPOConfig, Rollout


def test_advantages_are_those_worked_out_by_hand():
    """gamma 0.9, lambda 0.5: delta_2 = 3 - 1, delta_1 = 2 + 0.9 x 1 - 0.5, delta_0 = 1 + 0.9 x 0.5 - 0.2."""
    r, V = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.2], [0.5], [1.0]])
    A2, A1 = 2.0, 2.4 + 0.45 * 2.0
    assert ppo.gae(r, V, 0.9, 0.5)[:, 0].tolist() == pytest.approx([1.25 + 0.45 * A1, A1, A2])


def test_with_lambda_1_an_advantage_is_what_is_still_to_come_beyond_the_value():
    r, V = torch.randn(7, 3), torch.randn(7, 3)
    to_come = r.flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(ppo.gae(r, V, 1.0, 1.0), to_come - V)


@pytest.mark.parametrize(("ratio", "A", "expected"), [
    (1.0, 2.0, -2.0), (1.5, 2.0, -2.4), (0.5, 2.0, -1.0), (1.5, -2.0, 3.0), (0.5, -2.0, 1.6),
])  # fmt: skip
def test_the_clipped_loss_is_the_one_worked_out_by_hand(ratio, A, expected):
    """Clip 0.2: a gain counts up to 1.2, a loss in full; of a bad action nothing is gained below 0.8."""
    loss = ppo.clipped_loss(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([A]), 0.2)
    assert float(loss) == pytest.approx(expected)


def test_an_untrained_policy_is_the_softened_lagrangian():
    policy, table = Policy(15, 0.5), torch.rand(4, 2, 7)
    mask = torch.rand(4, 7) < 0.7
    mask[:, 3] = True
    logits, V = policy(torch.randn(4, 15), table, mask)
    expected = (-table.sum(1) / 0.5).masked_fill(~mask, float("-inf"))
    assert torch.equal(logits.isinf(), ~mask) and torch.equal(V, torch.zeros(4))
    torch.testing.assert_close(logits.softmax(-1), expected.softmax(-1))


def rollout_of(policy, state, table, mask, seed):
    with torch.no_grad():
        logits, V = policy(state, table, mask)
    log_all = ppo.log_probabilities(logits)
    actions = torch.multinomial(log_all.exp(), 1, generator=torch.Generator().manual_seed(seed))
    return actions.squeeze(1), log_all.gather(1, actions).squeeze(1), V


def test_masked_widths_are_never_taken_and_cost_no_gradient():
    policy = Policy(15, 0.5)
    state, table, mask = torch.randn(500, 15), torch.rand(500, 2, 7), torch.rand(500, 7) < 0.5
    mask[:, 2] = True
    actions, log_pi, V = rollout_of(policy, state, table, mask, 0)
    assert bool(mask.gather(1, actions[:, None]).all())
    rollout = Rollout(state, table, mask, actions, log_pi, V, torch.randn(500), torch.randn(500))
    ppo.update(policy, torch.optim.Adam(policy.parameters()), rollout, PPOConfig(minibatch=100), torch.Generator())
    assert all(bool(torch.isfinite(p).all()) for p in policy.parameters())


def bandit(seed, rounds=60):
    """One step; of the three open widths the middle one pays, which the table does not say. Returns its probability."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    policy, config = Policy(15, 1.0), PPOConfig(lr=1e-2, minibatch=64)
    optimizer = torch.optim.Adam(policy.parameters(), config.lr)
    state, table, mask = torch.ones(64, 15), torch.zeros(64, 2, 7), torch.zeros(64, 7, dtype=torch.bool)
    mask[:, 1:4] = True
    found = {}
    for i in range(rounds):
        actions, log_pi, V = rollout_of(policy, state, table, mask, 1000 * seed + i)
        r = (actions == 2).float()
        A = ppo.gae(r[None], V[None], config.gamma, config.lam)[0]
        found = ppo.update(policy, optimizer, Rollout(state, table, mask, actions, log_pi, V, A, A + V), config, generator)
    return float(policy(state, table, mask)[0].detach().softmax(-1)[0, 2]), found


def test_it_learns_what_the_table_does_not_say():
    probability, found = bandit(0)
    assert probability > 0.95
    assert found.keys() == {"entropy", "kl", "clip_fraction", "explained_variance"}


def test_the_same_seed_learns_the_same():
    assert bandit(1, 5) == bandit(1, 5)


@pytest.mark.parametrize(("given", "message"), [({"lr": 0.0}, "lr 0 is not above 0"), ({"lam": 1.5}, "lam 1.5 is not between"),
                                                ({"epochs": 0}, "epochs 0")])  # fmt: skip
def test_settings_out_of_range_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**given)


def test_a_rollouts_minibatches_hold_every_step_once():
    rollout = Rollout(*(torch.arange(10.0) for _ in range(8)))
    seen = torch.cat([b.A for b in rollout.minibatches(3, torch.Generator().manual_seed(0))])
    assert sorted(seen.tolist()) == list(range(10)) and not torch.equal(seen, rollout.A)


class Walk(gym.Env):
    """Six units, three widths each, no two equal in a row (masked); a width's worth depends on the unit, by a table that the
    observation does not show but for the unit."""

    observation_space = gym.spaces.Box(0, 1, (15,))
    action_space = gym.spaces.Discrete(7)

    def __init__(self):
        self.worth = torch.rand(6, 7, generator=torch.Generator().manual_seed(5))

    def observe(self):
        out = torch.zeros(15)
        out[min(self.at, 5)] = 1
        return out.numpy()

    def reset(self, *, seed=None, options=None):
        self.at, self.last = 0, None
        return self.observe(), {}

    def action_masks(self):
        mask = torch.arange(7) < 3
        if self.last is not None:
            mask[self.last] = False
        return mask.numpy()

    def step(self, action):
        action = int(action)
        reward, self.last = float(self.worth[self.at, action]), action
        self.at += 1
        return self.observe(), reward, self.at == 6, False, {}

    def optimum(self):
        """By trying all plans."""
        plans = torch.cartesian_prod(*[torch.arange(3)] * 6)
        plans = plans[(plans[:, 1:] != plans[:, :-1]).all(1)]
        return float(self.worth.gather(1, plans.T).sum(0).max())


def ours(steps):
    """The mean return of the policy after so many steps of the walk."""
    torch.manual_seed(0)
    generator, env = torch.Generator().manual_seed(0), Walk()
    policy, config = Policy(15, 1.0), PPOConfig(lr=3e-3, gamma=1.0, lam=0.95, minibatch=64, epochs=10)
    optimizer = torch.optim.Adam(policy.parameters(), config.lr)

    def play(episodes, draw):
        kept, rewards = [[] for _ in range(6)], []
        for _ in range(episodes):
            state, done = env.reset()[0], False
            while not done:
                s, mask = torch.tensor(state)[None], torch.tensor(env.action_masks())[None]
                with torch.no_grad():
                    logits, V = policy(s, torch.zeros(1, 2, 7), mask)
                log_all = ppo.log_probabilities(logits)
                a = torch.multinomial(log_all.exp(), 1, generator=generator) if draw else log_all.argmax(1, keepdim=True)
                state, r, done, _, _ = env.step(a)
                rewards.append(r)
                for values, t in zip(kept, (s, torch.zeros(1, 2, 7), mask, a[0], log_all.gather(1, a)[0], V), strict=True):
                    values.append(t)
        return [torch.cat(values) for values in kept], torch.tensor(rewards).view(episodes, 6).T

    for _ in range(steps // 252):
        (state, table, mask, actions, log_pi, V), r = play(42, True)
        A = ppo.gae(r, V.view(42, 6).T, config.gamma, config.lam).T.flatten()
        ppo.update(policy, optimizer, Rollout(state, table, mask, actions, log_pi, V, A, A + V), config, generator)
    return float(play(1, False)[1].sum())


@pytest.mark.filterwarnings("ignore")  # stable-baselines3's own
def test_it_learns_as_well_as_another_implementation():
    """sb3-contrib's PPO with masked actions, on the same problem with the same settings: both end within 2 % of the best plan."""
    from sb3_contrib import MaskablePPO

    model = MaskablePPO("MlpPolicy", Walk(), learning_rate=3e-3, n_steps=252, batch_size=63, n_epochs=10, gamma=1.0,
                        ent_coef=1e-3, target_kl=0.1, seed=0, device="cpu")  # fmt: skip
    model.learn(5040)
    env, total, done = Walk(), 0.0, False
    state, _ = env.reset()
    while not done:
        action, _ = model.predict(state, action_masks=env.action_masks(), deterministic=True)
        state, reward, done, _, _ = env.step(action)
        total += reward
    best = env.optimum()
    assert total > 0.98 * best and ours(5040) > 0.98 * best
