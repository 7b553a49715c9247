import torch

from tests.windquant.test_search import BODY, KINDS, loss_of, table
from windquant.correction import correct, features


def any_plans(n, seed=1):
    return torch.randint(0, 5, (n, len(BODY)), generator=torch.Generator().manual_seed(seed))


def test_a_units_tents_add_up_to_one_and_are_of_its_kind():
    tents = features(BODY, 3).view(len(BODY), len(KINDS), 3)
    assert torch.allclose(tents.sum((1, 2)), torch.ones(len(BODY), dtype=torch.float64))
    assert all(tents[i, KINDS.index(u.matrix.kind)].sum() == 1 for i, u in enumerate(BODY))
    assert tents[0, 0].tolist() == [1, 0, 0] and tents[-1, -1].tolist() == [0, 0, 1]


def test_the_correction_finds_factors_of_features():
    """From losses that follow the model exactly, but for an offset."""
    D, f = table(), features(BODY, 3)
    truth = 0.3 * D * (1 + f @ torch.linspace(-0.4, 0.8, f.shape[1], dtype=torch.float64))[:, None]
    choices = any_plans(300)
    found = correct(D, f, choices, 3.7 + loss_of(truth)(choices))
    torch.testing.assert_close(found, truth, rtol=1e-2, atol=0)


def test_where_losses_follow_the_table_it_stands_but_for_its_scale():
    D, f = table(), features(BODY, 3)
    choices = any_plans(40)
    noise = 1e-5 * torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(correct(D, f, choices, 0.3 * loss_of(D)(choices) + noise), 0.3 * D, rtol=2e-2, atol=0)


def test_more_noise_means_less_correction():
    D, f = table(), features(BODY, 3)
    truth = D * (1 + f @ torch.linspace(-0.4, 0.8, f.shape[1], dtype=torch.float64))[:, None]
    choices, noise = any_plans(40), torch.randn(20, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = loss_of(truth)(choices)

    def spread(y):
        return float((correct(D, f, choices, y) / D).log().std())

    noisy = torch.tensor([spread(losses + 2 * losses.std() * n) for n in noise])
    assert noisy.mean() < 0.6 * spread(losses) and noisy.median() < 0.4 * spread(losses)


def test_three_plans_and_losses_that_fall_with_distortion_say_nothing():
    D, f = table(), features(BODY, 3)
    assert torch.equal(correct(D, f, any_plans(3), loss_of(D)(any_plans(3))), D)
    assert torch.equal(correct(D, f, any_plans(40), -loss_of(D)(any_plans(40))), D)
