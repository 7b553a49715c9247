import pytest
import torch

from windquant.allocate import Problem, lagrangian, price
from windquant.correction import features
from windquant.environment import Environment, Standard, static_state
from windquant.ppo import PPOConfig
from windquant.search import Counted, Search, SearchConfig, states_along
from windquant.units import Matrix, cut, sizes

KINDS = ("q_proj", "v_proj", "up_proj", "down_proj")
BODY = cut([Matrix(f"layers.{i}.{kind}", i, 64, 128) for i in range(6) for kind in KINDS], 32)


def table(seed=0):
    """Distortions that fall four times a bit, of units that differ by orders of magnitude."""
    g = torch.Generator().manual_seed(seed)
    scale = torch.exp(torch.randn(len(BODY), 1, generator=g, dtype=torch.float64))
    return 1e-3 * scale * 4.0 ** -torch.tensor([1, 1.58, 2, 3, 4, 8, 16], dtype=torch.float64)


def truth(D, strength=1.0):
    """What the table does not know: a factor by kind and depth."""
    kind = torch.tensor([KINDS.index(u.matrix.kind) for u in BODY], dtype=torch.float64)
    depth = torch.tensor([u.matrix.block / 5 for u in BODY], dtype=torch.float64)
    return D * torch.exp(strength * (kind - 1.5 + 1.5 * (1 - depth)))[:, None]


def problem(bits=2.3, D=None):
    B = sizes(BODY)
    return Problem(table() if D is None else D, B, int(bits / 8 * sum(u.weights for u in BODY)) + 40 * len(BODY))


def loss_of(D):
    return lambda choices: D.gather(1, choices.T).sum(0)


def search(seed=0, start=None, aim=None, **config):
    given = problem()
    own = torch.nn.functional.one_hot(torch.tensor([KINDS.index(u.matrix.kind) for u in BODY]), 6)  # so that kinds differ
    static = static_state(BODY, given.D, own)
    learning = PPOConfig(lr=2e-3, minibatch=64, gamma=0.0, lam=0.0)
    f = features(BODY, 3)
    return Search(
        given, Standard.of(static)(static), f, loss_of(truth(given.D)), SearchConfig(**config), learning, seed, start, aim
    )


def test_a_plan_is_never_asked_for_twice():
    calls = []
    counted = Counted(lambda c: (calls.append(len(c)), c.sum(1).double())[1])
    a, b = torch.tensor([[0, 1], [2, 2], [0, 1]]), torch.tensor([[2, 2], [3, 3]])
    assert counted(a).tolist() == [1, 4, 1] and counted(b).tolist() == [4, 6]
    assert calls == [2, 1] and len(counted.known) == 3


def test_a_loss_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="the true loss of a plan is NaN or Inf"):
        Counted(lambda c: torch.tensor([float("nan")]))(torch.zeros(1, 2, dtype=torch.int64))


def test_the_search_beats_the_lagrangian_of_the_table_it_started_from():
    """And comes most of the way to the optimum, the lagrangian of the truth."""
    found = search(episodes=96, batch=8, losses=4)
    while found.episodes < 96:
        stats = found.rollout()
    given = problem()
    true = loss_of(truth(given.D))
    start = float(true(lagrangian(given, torch.Generator())[None]))
    best = float(true(lagrangian(problem(D=truth(given.D)), torch.Generator())[None]))
    (choice,), (loss,) = found.loss.best(1)
    assert float(loss) == pytest.approx(float(true(choice[None]))) == pytest.approx(stats["best_loss"])
    assert given.size(choice) <= given.budget
    assert (loss - best) < 0.2 * (start - best)
    assert all(given.size(c) <= given.budget for c in found.loss.all()[0])
    assert len(found.loss.known) <= 1 + 12 * 4


def test_the_same_seed_finds_the_same():
    runs = []
    for seed in (0, 0, 1):
        found = search(seed, episodes=8, batch=4)
        stats = [found.rollout(), found.rollout()]
        runs.append((stats, found.loss.all()[0].tolist()))
    assert runs[0] == runs[1] and runs[0][1] != runs[2][1]


def test_a_search_that_was_interrupted_goes_on_to_the_same_result():
    whole, cut_off, again = (search(episodes=12, batch=4) for _ in range(3))
    for _ in range(3):
        stats = whole.rollout()
    cut_off.rollout()
    again.load(cut_off.state())
    again.rollout()
    assert again.rollout() == stats
    ours, theirs = again.state(), whole.state()
    assert ours.keys() == theirs.keys() and all(torch.equal(t, theirs[name]) for name, t in ours.items())


@pytest.mark.parametrize(("aim", "rises"), [(0.0, True), (10.0, False)])
def test_the_multiplier_of_quality_rises_while_losses_are_above_their_aim(aim, rises):
    found = search(aim=aim, episodes=4, batch=4)
    assert (found.rollout()["mu"] > 1) == rises


def test_the_multiplier_of_quality_changes_what_is_learned():
    found = [search(aim=1e-2 if mu is None else None, episodes=4, batch=4, losses=2) for mu in (None, 1.0)]
    for s, mu in zip(found, (4.0, 0.25), strict=True):
        s.aim, s.mu = None, mu
        s.rollout()
    weights = [torch.cat([p.flatten() for p in s.policy.actor.parameters()]) for s in found]
    assert not torch.allclose(*weights, atol=1e-6)


@pytest.mark.parametrize("bits", [2.3, 10.5, 15.5])
def test_a_search_starts_at_any_target(bits):
    """Where a lagrangian plan leaves more than half a percent of the budget unused, too."""
    given = problem(bits)
    states = states_along(given, torch.zeros(len(BODY), 11), lagrangian(given, torch.Generator()))
    assert states.shape == (len(BODY), 15) and bool(torch.isfinite(states).all())


def test_no_more_episodes_are_played_than_asked_for():
    found = search(episodes=6, batch=4)
    assert [found.rollout()["episodes"] for _ in range(2)] == [4, 6]
    with pytest.raises(ValueError, match="all 6 episodes are played"):
        found.rollout()


def test_the_first_plan_is_the_lagrangians():
    found = search()
    assert torch.equal(found.loss.all()[0][0], lagrangian(problem(), torch.Generator())) and found.episodes == 0
    assert torch.equal(found.plan(), found.first)


def test_plans_asked_for_keep_the_budget_and_lie_near_the_best_that_is_known():
    found = search(episodes=96, batch=8, losses=6)
    for _ in range(6):
        found.rollout()
    given, true = problem(), loss_of(truth(problem().D))
    _, choice = found._play(torch.ones(len(BODY), 8, dtype=torch.float64))
    asked = found._asked(choice)
    assert len(asked) == 6 and torch.equal(asked[2], choice[0]) and all(given.size(c) <= given.budget for c in asked)
    start = float(true(found.first[None]))
    assert all(float(true(c[None])) < start for c in asked[3:])


def test_the_best_plans_come_first():
    counted = Counted(lambda c: c.sum(1).double())
    counted(torch.tensor([[2, 2], [0, 1], [1, 1]]))
    choices, losses = counted.best(2)
    assert choices.tolist() == [[0, 1], [1, 1]] and losses.tolist() == [1, 2]


def test_states_along_a_plan_are_the_environments():
    given, static = problem(), torch.rand(len(BODY), 11)
    env = Environment(given, static, 1, 0.1)
    state, _ = env.reset()
    choice = lagrangian(given, torch.Generator())
    for along, action in zip(states_along(given, static, choice), choice, strict=True):
        assert torch.equal(along, torch.as_tensor(state)[0])
        state, *_ = env.step(action[None])


def test_a_policy_goes_on_from_another_budgets():
    before = search(episodes=4, batch=4)
    before.rollout()
    after = search(start=before.policy)
    assert all(torch.equal(p, q) for p, q in zip(before.policy.parameters(), after.policy.parameters(), strict=True))
    assert after.policy is not before.policy


def test_the_price_rises_as_the_budget_falls():
    assert price(problem(2.0)) > price(problem(2.3)) > price(problem(3.0)) > 0


@pytest.mark.parametrize("given", [{"episodes": -1}, {"batch": 0}, {"losses": 0}, {"explore": -1.0}])
def test_settings_out_of_range_are_refused(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        SearchConfig(**given)
