import pytest
import torch
from gymnasium.vector import VectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from windquant.allocate import Problem
from windquant.environment import CONTEXT, FILL, STATIC, Environment, Standard, static_state
from windquant.grids import WIDTHS
from windquant.units import Matrix, cut, sizes

BODY = cut([Matrix(f"layers.{i}.{kind}", i, 32, 96) for i in range(3) for kind in ("attn.q", "mlp.up")], 32)
MANY = cut([Matrix(f"layers.{i}.up", i, 32, 96) for i in range(100)], 32)
TWO = WIDTHS.index(2)


def problem(share=0.3, seed=0, body=BODY):
    """share: where the budget lies between the narrowest and the widest plan."""
    B = sizes(body)
    D = torch.rand(len(body), len(WIDTHS), generator=torch.Generator().manual_seed(seed)).sort(1, descending=True).values
    low, high = int(B.amin(1).sum()), int(B.amax(1).sum())
    return Problem(D, B, low + int(share * (high - low)))


def environment(given, episodes=2, **options):
    return Environment(given, torch.zeros(len(given.B), len(STATIC)), episodes, 1e-3, **options)


def play(env, choose, seed=0):
    """All rewards (steps, episodes), and the last step's info."""
    _, info = env.reset(seed=seed)
    rewards, done = [], False
    while not done:
        _, reward, ends, _, info = env.step(choose(torch.as_tensor(info["mask"])))
        rewards.append(torch.as_tensor(reward))
        done = bool(ends.all())
    return torch.stack(rewards), info


def at_random(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda mask: torch.multinomial(mask.float(), 1, generator=generator).squeeze(1)


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1), st.integers(0, 10**6))
def test_any_policys_plan_keeps_the_budget(share, seed):
    given = problem(share)
    _, info = play(environment(given), at_random(seed))
    assert all(given.size(c) <= given.budget for c in torch.as_tensor(info["choice"]))


@settings(max_examples=30, deadline=None)
@given(st.floats(0.02, 0.98), st.integers(0, 10**6))
def test_any_policys_plan_of_many_units_uses_nearly_all_of_it(share, seed):
    """As many as give the last of them choices finer than what may be left."""
    given = problem(share, body=MANY)
    _, info = play(environment(given, 1), at_random(seed))
    assert given.size(torch.as_tensor(info["choice"])[0]) >= FILL * given.budget


@pytest.mark.parametrize("choose", [lambda m: m.float().argmax(1), lambda m: 6 - m.flip(1).float().argmax(1)])
def test_always_the_narrowest_and_always_the_widest_are_feasible_too(choose):
    """Left to themselves they would end far below, or far above."""
    given = problem(body=MANY)
    _, info = play(environment(given), choose)
    assert FILL * given.budget <= given.size(torch.as_tensor(info["choice"])[0]) <= given.budget


def test_a_masked_width_is_refused():
    given = problem(0.0)
    env = environment(given, 1)
    env.reset()
    with pytest.raises(ValueError, match="unit 0: a masked width was chosen"):
        env.step([6])


def test_step_rewards_add_up_to_what_the_plan_costs_beyond_the_best_at_that_price():
    given = problem()
    env = environment(given)
    rewards, info = play(env, at_random(3))
    for e, choice in enumerate(torch.as_tensor(info["choice"])):
        best = (given.D.double() + 1e-3 * given.B).amin(1).sum()
        cost = given.distortion(choice) + 1e-3 * given.size(choice)
        assert float(-rewards[:, e].sum() * env.unit) == pytest.approx(cost - float(best))


def test_the_multiplier_of_quality_weighs_distortions_against_bits():
    given = problem()
    once, twice = environment(given), environment(given, mu=2.0)

    def against_the_narrowest(env):
        return (env.rewards - env.rewards[:, :1]) * env.unit

    more = against_the_narrowest(once) - against_the_narrowest(twice)
    torch.testing.assert_close(more, (given.D - given.D[:, :1]).double())


def test_an_episode_ends_with_its_true_loss():
    given = problem()
    losses = torch.tensor([0.5, 2.0])
    with_loss, _ = play(env := environment(given, loss=lambda choices: losses, mu=3.0), at_random(3))
    without, _ = play(environment(given, mu=3.0), at_random(3))
    assert torch.allclose((without - with_loss)[-1] * env.unit, 3.0 * losses.double())
    assert torch.equal(without[:-1], with_loss[:-1])


def test_it_is_a_gymnasium_environment():
    env = environment(problem())
    assert isinstance(env, VectorEnv)
    state, info = env.reset(seed=0)
    assert env.observation_space.contains(state) and state.shape == (2, 15) and info["mask"].shape == (2, 7)
    assert env.action_space.contains(env.action_space.sample())


def test_the_context_counts_units_and_bytes():
    given = problem()
    env = environment(given, 1)
    env.reset()
    for _ in range(6):
        env.step([TWO])
    progress, budget, urgency, spent = env.state()[0, -len(CONTEXT) :].tolist()
    left, rest = given.budget - int(given.B[:6, TWO].sum()), given.B[6:]
    assert progress == pytest.approx(6 / len(BODY)) and spent == pytest.approx(1)
    assert budget == pytest.approx(left / int(rest[:, TWO].sum()))
    assert urgency == pytest.approx((left - int(rest.amin(1).sum())) / given.budget)


def test_the_standardised_state_has_mean_0_and_deviation_1_or_does_not_vary():
    given = problem()
    raw = static_state(BODY, given.D, torch.rand(len(BODY), 6))
    state = Standard.of(raw)(raw)
    assert raw.shape == (len(BODY), len(STATIC)) and torch.allclose(state.mean(0), torch.zeros(11), atol=1e-5)
    deviations = state.std(0, correction=0)
    assert ((deviations - 1).abs() < 1e-4).logical_or(deviations < 1e-4).all()
    assert raw[:, STATIC.index("attention")].unique().tolist() == [0, 1]
    assert raw[:, STATIC.index("depth")].unique().tolist() == [0, 0.5, 1]


def test_a_state_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"the state of 18 units has the shape \(18, 3\), not \(18, 11\)"):
        Environment(problem(), torch.zeros(18, 3), 1, 0.1)
