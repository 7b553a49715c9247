import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.conftest import tiny_config
from windquant.hessian import HessianConfig, hessian_product, lanczos, spectrum, straight_through


def symmetric(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(n, n, generator=g, dtype=torch.float64)
    return (A + A.T) / 2


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def of(A, probes=1, steps=200, **options):
    return spectrum(A.__matmul__, len(A), HessianConfig(probes, steps, **options), generator(), dtype=torch.float64)


def tiny_loss():
    """A small classifier in float64, and its parameters."""
    g = generator(1)
    x, y = torch.randn(30, 4, generator=g, dtype=torch.float64), torch.randint(0, 3, (30,), generator=g)
    W = [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in ((5, 4), (3, 5))]
    return (lambda: F.cross_entropy(torch.tanh(x @ W[0].T) @ W[1].T, y)), W


def dense_hessian(loss, parameters):
    flat = []
    for g in torch.autograd.grad(loss(), parameters, create_graph=True):
        for value in g.flatten():
            rows = torch.autograd.grad(value, parameters, retain_graph=True)
            flat.append(torch.cat([r.flatten() for r in rows]))
    return torch.stack(flat)


def test_products_are_those_of_the_dense_hessian():
    loss, W = tiny_loss()
    H, product = dense_hessian(loss, W), hessian_product(loss, W)
    for seed in range(3):
        v = torch.randn(35, generator=generator(seed), dtype=torch.float64)
        torch.testing.assert_close(product(v), H @ v, rtol=1e-9, atol=1e-12)


def test_of_a_small_model_density_trace_and_extremes_are_those_of_the_eigendecomposition():
    loss, W = tiny_loss()
    eigenvalues = torch.linalg.eigvalsh(dense_hessian(loss, W))
    found = spectrum(hessian_product(loss, W), 35, HessianConfig(300, 35), generator(), dtype=torch.float64)
    figures = found.figures()
    assert figures["lambda_max"] == pytest.approx(float(eigenvalues.max()), rel=1e-6)
    assert figures["lambda_min"] == pytest.approx(float(eigenvalues.min()), rel=1e-6)
    assert abs(figures["trace"] - float(eigenvalues.sum())) < 4 * figures["trace_std"] / 300**0.5
    at, width = torch.linspace(-0.2, 1, 200, dtype=torch.float64), 0.05
    z = (at[:, None] - eigenvalues) / width
    exact = ((-0.5 * z * z).exp() / (width * (2 * torch.pi) ** 0.5)).mean(1)
    assert (found.density(at, width) - exact).abs().max() < 0.05 * exact.max()


@pytest.mark.parametrize("m", [1, 3, 6])
def test_m_steps_reproduce_the_moments_up_to_2m_minus_1(m):
    A = symmetric(40)
    signs = (2 * torch.randint(0, 2, (40,), generator=generator()) - 1).double()
    z = signs / signs.norm()
    found = of(A, steps=m)
    for k in range(2 * m):
        exact = float(z @ torch.linalg.matrix_power(A, k) @ z)
        assert float(found.each(lambda n, k=k: n**k)[0]) == pytest.approx(exact, rel=1e-8, abs=1e-8)
    k = 2 * m
    exact = float(z @ torch.linalg.matrix_power(A, k) @ z)
    assert float(found.each(lambda n, k=k: n**k)[0]) != pytest.approx(exact, rel=1e-6)


def test_one_probe_of_signs_is_exact_for_trace_and_mean_square_of_a_diagonal_operator():
    d = torch.randn(50, generator=generator(3), dtype=torch.float64)
    figures = of(torch.diag(d), steps=5).figures()
    assert figures["trace"] == pytest.approx(float(d.sum()))
    assert figures["rms"] == pytest.approx(float(d.square().mean().sqrt()))


def test_of_a_tiny_llama_too():
    """Keys and values of a block, through attention; float64 but for what transformers does in float32."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(tiny_config(**sizes, initializer_range=0.5)).double().eval().requires_grad_(False)
    W = [getattr(model.model.layers[0].self_attn, n).weight.requires_grad_() for n in ("k_proj", "v_proj")]
    ids = torch.randint(300, (2, 12), generator=generator())
    with sdpa_kernel(SDPBackend.MATH):
        H = dense_hessian(lambda: model(input_ids=ids, labels=ids).loss, W)
    eigenvalues, size = torch.linalg.eigvalsh(H), len(H)
    product = hessian_product(lambda: model(input_ids=ids, labels=ids).loss, W)
    found = spectrum(product, size, HessianConfig(3, 40), generator(), dtype=torch.float64)
    figures, g = found.figures(), generator()
    assert figures["lambda_max"] == pytest.approx(float(eigenvalues.max()), rel=1e-6)
    assert figures["lambda_min"] == pytest.approx(float(eigenvalues.min()), rel=1e-6)
    Z = torch.stack([2 * torch.randint(0, 2, (size,), generator=g) - 1 for _ in range(3)]).double()
    for k in range(1, 6):
        exact = torch.einsum("pi,ij,pj->p", Z, torch.linalg.matrix_power(H, k), Z) / size
        torch.testing.assert_close(found.each(lambda n, k=k: n**k), exact, rtol=1e-5, atol=0)  # norms and loss are float32


def test_the_trace_is_hutchinsons_estimate_from_the_same_probes():
    """However few the steps."""
    A, g, estimates = symmetric(40), generator(), []
    for _ in range(3):
        z = (2 * torch.randint(0, 2, (40,), generator=g) - 1).double()
        estimates.append(float(z @ A @ z))
    figures = of(A, probes=3, steps=2).figures()
    assert figures["trace"] == pytest.approx(sum(estimates) / 3)
    assert figures["trace_std"] == pytest.approx(float(torch.tensor(estimates).std()))


def test_straight_through_leaves_out_rows_and_columns():
    A, inside = symmetric(6), torch.tensor([1.0, 0, 1, 1, 0, 1]).double()
    product = straight_through(A.__matmul__, inside)
    dense = torch.stack([product(e) for e in torch.eye(6).double()])
    kept = inside.bool()
    assert (
        torch.equal(dense[kept][:, kept], A[kept][:, kept])
        and float(dense[~kept].abs().sum() + dense[:, ~kept].abs().sum()) == 0
    )


def test_no_eigenvalue_comes_twice():
    """Without orthogonalisation against all vectors a large one does, long before 60 steps."""
    d = torch.cat([torch.tensor([1000.0, 500.0]), torch.linspace(0, 1, 98)]).double()
    nodes = of(torch.diag(d), steps=60).nodes[0]
    assert ((nodes - 1000).abs() < 1).sum() == 1 and ((nodes - 500).abs() < 1).sum() == 1


def test_an_invariant_subspace_ends_the_steps():
    """Three distinct eigenvalues: three steps."""
    d = torch.tensor([1.0, 2.0, 5.0]).repeat(20).double()
    alpha, beta = lanczos(torch.diag(d).__matmul__, torch.ones(60, dtype=torch.float64), 30)
    assert len(alpha) == 3 and len(beta) == 2
    assert torch.linalg.eigvalsh(torch.diag(alpha) + torch.diag(beta, 1) + torch.diag(beta, -1)).tolist() == pytest.approx(
        [1, 2, 5]
    )


def test_shares_near_zero_and_below_it():
    d = torch.tensor([-1.0] * 10 + [1e-5] * 30 + [1.0] * 60).double()
    figures = of(torch.diag(d), probes=20, near_zero=1e-3).figures()
    assert figures["near_zero"] == pytest.approx(0.3, abs=1e-6) and figures["negative"] == pytest.approx(0.1, abs=1e-6)
    assert figures["near_zero_std"] < 1e-6


def test_models_are_compared_at_one_threshold():
    small = of(torch.diag(torch.tensor([0.01] * 50 + [1e-6] * 50).double()), probes=20)
    assert small.figures()["near_zero"] == pytest.approx(0.5) and small.figures(0.1)["near_zero"] == pytest.approx(1)


def test_the_density_integrates_to_one():
    found = of(symmetric(30), probes=3)
    at = torch.linspace(-30, 30, 4001, dtype=torch.float64)
    assert float(torch.trapezoid(found.density(at, 0.3), at)) == pytest.approx(1, abs=1e-6)


def test_the_spread_over_probes_falls_where_probes_agree():
    assert of(symmetric(60), probes=6, steps=10).figures()["trace_std"] > 0
    assert of(torch.diag(torch.ones(60).double()), probes=6).figures()["trace_std"] < 1e-9


def test_the_same_seed_gives_the_same_spectrum():
    one, two = of(symmetric(40), probes=2, steps=8), of(symmetric(40), probes=2, steps=8)
    assert all(torch.equal(a, b) for a, b in zip(one.nodes + one.weights, two.nodes + two.weights, strict=True))


def test_attention_is_differentiated_twice(tiny):
    ids = torch.arange(24).view(2, 12)
    p = tiny.model.layers[0].self_attn.q_proj.weight.requires_grad_()
    product = hessian_product(lambda: tiny(input_ids=ids, labels=ids).loss, [p])
    v = torch.randn(p.numel(), generator=generator())
    found, h = product(v), 1e-2

    def gradient(step):
        with torch.no_grad():
            p.add_(step * v.view_as(p))
        g = torch.autograd.grad(tiny(input_ids=ids, labels=ids).loss, p)[0].flatten()
        with torch.no_grad():
            p.sub_(step * v.view_as(p))
        return g

    by_differences = (gradient(h) - gradient(-h)) / (2 * h)
    assert torch.nn.functional.cosine_similarity(found, by_differences, 0) > 0.99


def test_parameters_that_the_loss_does_not_depend_on_have_zero_curvature():
    """As an expert's that no token calls."""
    a, b = torch.ones(3).requires_grad_(), torch.ones(2).requires_grad_()
    product = hessian_product(lambda: (a**3).sum(), [a, b])
    assert product(torch.ones(5)).tolist() == [6, 6, 6, 0, 0]


def test_a_linear_loss_has_no_curvature():
    a = torch.ones(3).requires_grad_()
    assert hessian_product(lambda: a.sum(), [a])(torch.ones(3)).tolist() == [0, 0, 0]


def test_weights_that_change_under_a_product_are_an_error_not_a_stale_hessian():
    a = torch.ones(3).requires_grad_()
    product = hessian_product(lambda: (a**3).sum(), [a])
    with torch.no_grad():
        a.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product(torch.ones(3))


def test_a_product_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="NaN or Inf in Lanczos step 1"):
        lanczos(lambda v: v * float("nan"), torch.ones(4), 3)


@pytest.mark.parametrize("given", [{"probes": 0}, {"steps": 0}, {"near_zero": 0.0}])
def test_settings_out_of_range_are_refused(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        HessianConfig(**given)
