import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.windquant.test_search import loss_of, problem, truth
from windquant.allocate import Problem, lagrangian
from windquant.evolution import evolution, mutate
from windquant.search import Counted
from windquant.units import Matrix, cut, sizes


def quiet(done, total):
    pass


@settings(max_examples=50, deadline=None)
@given(st.floats(2.0, 8.0), st.integers(0, 10**6))
def test_a_mutation_keeps_the_budget_and_uses_it(bits, seed):
    generator, case = torch.Generator().manual_seed(seed), problem(bits)
    choice = lagrangian(case, generator)
    for _ in range(5):
        choice = mutate(case, choice, generator)
        step = int((case.B[:, 1:] - case.B[:, :-1]).max())
        assert case.budget - step < case.size(choice) <= case.budget


def test_it_takes_as_many_true_losses_as_it_is_given_and_never_ends_above_its_start():
    case, generator = problem(), torch.Generator().manual_seed(0)
    true = loss_of(truth(case.D))
    counted = Counted(true)
    found = evolution(case, counted, 100, 8, generator, quiet)
    assert len(counted.known) == 101
    start = float(true(lagrangian(case, generator)[None]))
    best = float(counted.best(1)[1])
    assert float(true(found[None])) == pytest.approx(best) and best < 0.95 * start


def test_the_same_seed_finds_the_same():
    case, runs = problem(), []
    for seed in (0, 0, 1):
        generator = torch.Generator().manual_seed(seed)
        runs.append(evolution(case, Counted(loss_of(truth(case.D))), 20, 4, generator, quiet).tolist())
    assert runs[0] == runs[1] != runs[2]


def test_it_ends_when_there_are_no_other_plans():
    """Two units, and a budget for the narrowest widths alone."""
    body = cut([Matrix("layers.0.up_proj", 0, 64, 64)], 32)
    B = sizes(body)
    case = Problem(torch.rand(2, 7), B, int(B.amin(1).sum()))
    assert evolution(case, Counted(lambda c: c.sum(1).double()), 5, 2, torch.Generator(), quiet).tolist() == [0, 0]
