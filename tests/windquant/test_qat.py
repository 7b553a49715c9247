import copy
import math

import pytest
import torch

from windquant import scales
from windquant.grids import GRIDS, decode, encode
from windquant.qat import QuantizedLinear, hadamard, layers, pull_to_grid_
from windquant.quantize import quantize_matrix
from windquant.reconstruct import INSIDE
from windquant.salient import Protection, protect

MIXED = [1, 1.58, 2, 3, 4, 8, 16, 2]
CHUNK = 16
BITS = [b for b in GRIDS if b < 16]


def packed_matrix(bits=MIXED, columns=120, rows=24, salient=False, seed=0):
    """By default the last unit is narrower than the others."""
    g = torch.Generator().manual_seed(seed)
    w, x = torch.randn(rows, columns, generator=g), torch.randn(400, columns, generator=g)
    kept = protect(w, torch.ones(columns), Protection("weights", 0.05)) if salient else None
    return quantize_matrix(w, x.T @ x / 400, bits, CHUNK, kept)[0]


def of(bits, **options):
    return QuantizedLinear(packed_matrix([bits] * 2, 32, **options))


def of_scales(layer):
    """The gradient of the scales, from that of their logarithms."""
    return layer.log.grad / (layer.s * math.log(2))


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("salient", [False, True])
def test_before_anything_is_learned_it_is_the_packed_matrix_bit_for_bit(salient, fixed):
    packed = packed_matrix(salient=salient)
    layer = QuantizedLinear(packed, fixed=fixed)
    x = torch.randn(5, 120)
    assert torch.equal(layer.weight, packed.dequantize())
    assert torch.equal(layer(x), torch.nn.functional.linear(x, packed.dequantize()))
    again = layer.packed().tensors()
    assert all(torch.equal(t, again[part]) for part, t in packed.tensors().items())


@pytest.mark.parametrize("salient", [False, True])
def test_started_near_other_weights_it_is_still_the_packed_matrix(salient):
    packed, like = packed_matrix(salient=salient), torch.randn(24, 120)
    layer, plain = QuantizedLinear(packed, like=like), QuantizedLinear(packed)
    assert torch.equal(layer.weight, packed.dequantize())
    wanted = layer.latent._units(like)
    nearer, before = (layer.w - wanted).abs(), (plain.w - wanted).abs()
    edge = (0.5 - INSIDE) * layer.latent.d() + 1e-4  # kept away from that
    assert (nearer <= before + edge).all() and nearer.mean() < 0.95 * before.mean()


@pytest.mark.parametrize("salient", [False, True])
def test_what_it_computes_with_is_what_it_packs(salient):
    layer = QuantizedLinear(packed_matrix(salient=salient))
    with torch.no_grad():
        before = layer.w.clone()
        layer.w += 0.3 * torch.randn_like(layer.w)
        for w, old, places in zip(layer.w, before, layer.latent.held or (), strict=False):
            w.view(-1)[places] = old.view(-1)[places]
        layer.log += 0.1 * torch.rand_like(layer.log)
    packed = layer.packed()
    torch.testing.assert_close(layer.weight, packed.dequantize(), rtol=0, atol=0)
    assert packed.sizes() == packed_matrix(salient=salient).sizes()


@pytest.mark.parametrize("bits", BITS)
def test_a_grid_has_as_many_levels_as_its_width_says(bits):
    layer = of(bits)
    with torch.no_grad():
        layer.w.normal_(0, 3)
    row = layer.weight[0, :CHUNK]
    assert len(layer.weight[:, :CHUNK].unique()) <= GRIDS[bits].levels * 24
    assert len(row.unique()) <= min(GRIDS[bits].levels, CHUNK)


@pytest.mark.parametrize("bits", BITS)
def test_gradients_of_weights_pass_straight_through_inside_the_grid_and_stop_outside(bits):
    layer, G = of(bits), torch.randn(24, 32)
    with torch.no_grad():
        layer.w[0, 0, 0], layer.w[0, 1, 0] = 1000.0, -1000.0
    layer.w.grad = None
    (layer(torch.eye(32)).T * G).sum().backward()
    expected = G.unflatten(1, (2, -1)).transpose(0, 1).clone()
    expected[0, 0, 0] = expected[0, 1, 0] = 0
    torch.testing.assert_close(layer.w.grad, expected)


@pytest.mark.parametrize("bits", BITS)
def test_gradients_of_scales_are_lsqs(bits):
    """dQ/ds = Q/s - w/s inside, Q/s outside, over the root of n Q_p."""
    layer, grid, G = of(bits, seed=1), GRIDS[bits], torch.randn(24, 32)
    with torch.no_grad():
        layer.w += 0.1 * torch.randn_like(layer.w)
        layer.w[1, 2, 3] = 1000.0
    (layer(torch.eye(32)).T * G).sum().backward()
    s = layer.s[..., None]
    w, Q = layer.w.detach(), layer.weight.unflatten(1, (2, -1)).transpose(0, 1)
    at = w / s
    low, high = grid.offset - grid.step / 2, grid.offset + grid.step * (grid.levels - 0.5)
    inside = (at > low) & (at < high)
    outermost = max(abs(grid.offset), abs(grid.offset + grid.step * (grid.levels - 1))) / grid.step
    of_s = (Q / s - torch.where(inside, at, 0.0)) * G.unflatten(1, (2, -1)).transpose(0, 1)
    expected = of_s.sum(-1) / (CHUNK * outermost) ** 0.5
    expected[layer.latent.beyond(expected)] = 0  # the scales at the ends of their range
    torch.testing.assert_close(of_scales(layer), expected, rtol=2e-2, atol=2e-2)


def test_scales_take_no_gradient_that_leads_out_of_their_stored_range():
    layer = of(2)
    low, step = layer.latent.span.float().unsqueeze(-1).unbind(1)
    ends = torch.where(torch.arange(24) % 2 == 0, low, low + 254 * step)
    with torch.no_grad():
        layer.log.copy_(ends)
    gradients = []
    for sign in (1, -1):
        layer.log.grad = None
        (sign * layer(torch.eye(32)).square().sum()).backward()
        gradients.append(layer.log.grad.clone())
    for at, forbidden in ((ends == low, 1), (ends != low, -1)):
        assert all((g[at].sign() != forbidden).all() for g in gradients) and any((g[at] != 0).any() for g in gradients)


def test_where_rounding_is_smooth_the_scales_gradient_is_that_of_finite_differences():
    """Outside the grid Q is the outermost level times s."""
    layer = of(2)
    with torch.no_grad():
        layer.w.fill_(1000.0)
    layer(torch.ones(1, 32)).sum().backward()
    before, s, gradient = layer.weight, layer.s, of_scales(layer)
    started = layer.latent.codes_of_scales()
    with torch.no_grad():
        layer.log += math.log2(1.2)
    moved = (layer.weight - before).unflatten(1, (2, -1)).sum(-1).T / (layer.s - s)
    codes = layer.latent.codes_of_scales()
    free = (codes > 10) & (codes < 150) & (started > 1) & (started < 255)  # inside their stored range, before and after
    assert free.any()
    torch.testing.assert_close((gradient * (CHUNK * 1.5) ** 0.5)[free], moved[free], rtol=0.1, atol=0)


@pytest.mark.parametrize("salient", [False, True])
def test_fixed_codes_stay_whatever_their_scales_learn(salient):
    packed = packed_matrix(salient=salient)
    layer = QuantizedLinear(packed, fixed=True).train()
    layer.sigma = 0.5
    before = packed.dequantize()
    with torch.no_grad():
        layer.log += torch.where(layer.log < layer.latent.span.float().mean(), 0.4, -0.4)  # stay inside their range
    layer.pull_to_grid_(0.4)
    after, new, old = layer.packed(), layer.packed().tensors(), packed.tensors()
    assert torch.equal(layer(torch.eye(120)).T, after.dequantize()) and not torch.equal(after.dequantize(), before)
    assert torch.equal(new["codes"], old["codes"]) and not torch.equal(new["scale"], old["scale"])
    still = packed.salient.mask() if salient else torch.zeros(24, 120, dtype=torch.bool)
    still[:, 6 * CHUNK : 7 * CHUNK] = True  # 16 bits
    assert torch.equal(after.dequantize()[still], before[still])
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["log"]


def test_the_gradient_of_fixed_codes_scales_is_that_of_finite_differences():
    packed, G = packed_matrix(salient=True), torch.randn(24, 120)
    layer = QuantizedLinear(packed, fixed=True)
    (layer(torch.eye(120)).T * G).sum().backward()
    before, started = layer.weight, layer.latent.codes_of_scales()
    with torch.no_grad():
        layer.log += 0.1
    moved = layer.latent.d() / QuantizedLinear(packed).latent.d() - 1
    each = torch.nn.functional.pad((layer.weight - before) * G, (0, 8)).unflatten(1, (8, -1)).sum(-1).T
    free = (started > 1) & (layer.latent.codes_of_scales() < 255) & ~layer.latent.exact[..., 0]
    expected = math.log(2) * each / moved[..., 0]
    torch.testing.assert_close(layer.log.grad[free], expected[free], rtol=1e-3, atol=1e-4)
    assert free.sum() > 100 and (layer.log.grad[layer.latent.exact.flatten()] == 0).all()


def test_salient_weights_take_no_gradient():
    packed = packed_matrix(salient=True)
    layer = QuantizedLinear(packed)
    layer(torch.randn(50, 120)).square().sum().backward()
    kept = layer.latent._units(packed.salient.mask())
    assert (layer.w.grad[kept] == 0).all() and (layer.w.grad[~kept][:1000] != 0).float().mean() > 0.5


def test_a_pull_goes_alpha_of_the_way_to_the_grid():
    """alpha 0 does nothing, alpha 1 ends on the grid, 0.4 keeps six tenths of the distance: not WinQ's public code."""
    layer = of(2)
    with torch.no_grad():
        layer.w += 0.2 * torch.randn_like(layer.w)
    w, Q = layer.w.detach().clone(), layer.latent._units(layer.weight).clone()
    layer.pull_to_grid_(0.0)
    assert torch.equal(layer.w, w)
    layer.pull_to_grid_(0.4)
    torch.testing.assert_close(layer.w.detach(), 0.6 * w + 0.4 * Q)
    layer.pull_to_grid_(1.0)
    torch.testing.assert_close(layer.w.detach(), Q)


def test_in_a_hadamard_basis_a_pull_goes_alpha_of_the_way_to_the_grid_there():
    layer, H = of(2), hadamard(CHUNK)
    with torch.no_grad():
        layer.w += 0.2 * torch.randn_like(layer.w)
    turned = layer.w.detach() @ H
    s, _ = scales.fit(turned, torch.eye(CHUNK).expand(2, -1, -1), GRIDS[2])
    Q = decode(encode(turned, s, GRIDS[2]), s, GRIDS[2])
    layer.pull_to_grid_(0.4, rotated=True)
    torch.testing.assert_close(layer.w.detach() @ H, 0.6 * turned + 0.4 * Q, rtol=1e-4, atol=1e-5)


def test_in_a_hadamard_basis_too_salient_weights_and_16_bit_units_stay():
    packed = packed_matrix([16, 2], 32, salient=True)
    layer = QuantizedLinear(packed)
    before, kept = layer.w.detach().clone(), layer.latent._units(packed.salient.mask())
    layer.pull_to_grid_(0.4, rotated=True)
    moved = layer.w.detach() != before
    assert not moved[0].any() and not moved[kept].any() and moved[1][~kept[1]].all()


@pytest.mark.parametrize("n", [1, 2, 64])
def test_hadamards_basis_is_orthonormal_and_flat(n):
    H = hadamard(n)
    torch.testing.assert_close(H @ H.T, torch.eye(n))
    assert (H.abs() == H[0, 0]).all()


@pytest.mark.parametrize("n", [0, 12])
def test_a_width_without_a_hadamard_basis_is_refused(n):
    with pytest.raises(ValueError, match=f"a unit of {n} columns has no Hadamard basis: it takes a power of 2"):
        hadamard(n)


def test_a_pull_changes_no_rounding():
    layer = QuantizedLinear(packed_matrix())
    with torch.no_grad():
        layer.w += 0.2 * torch.randn_like(layer.w)
    before = layer.weight
    layer.pull_to_grid_(0.4)
    torch.testing.assert_close(layer.weight, before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_an_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(ValueError, match=f"alpha {alpha:g} is not between 0 and 1"):
        pull_to_grid_(torch.nn.Sequential(of(2)), alpha)


def test_noise_is_there_in_training_alone_and_the_same_in_both_passes():
    """The gradient of the weights is 0 where noise took them outside, and only there: as the forward pass saw them."""
    layer, x = of(1), torch.eye(32)
    quiet = layer.eval()(x)
    assert torch.equal(quiet.T, layer.weight)
    layer.train()
    layer.sigma = 0.5
    torch.manual_seed(3)
    first = layer(x)
    first.sum().backward()
    assert not torch.equal(first, quiet)
    once, layer.w.grad, layer.log.grad = layer.w.grad, None, None
    torch.manual_seed(3)
    second = layer(x)
    second.sum().backward()
    assert torch.equal(first, second) and torch.equal(once, layer.w.grad)
    clipped = (once == 0).float().mean()
    assert 0 < clipped < 0.9


def test_noise_spares_salient_weights():
    packed = packed_matrix(salient=True)
    layer = QuantizedLinear(packed).train()
    layer.sigma = 0.5
    noisy, kept = layer(torch.eye(120)).T, packed.salient.mask()
    assert torch.equal(noisy[kept], packed.dequantize()[kept]) and not torch.equal(noisy, packed.dequantize())


def test_units_at_16_bits_learn_too():
    layer, G = of(16), torch.randn(24, 32)
    (layer(torch.eye(32)).T * G).sum().backward()
    torch.testing.assert_close(layer.w.grad, G.unflatten(1, (2, -1)).transpose(0, 1).contiguous())
    assert (layer.log.grad == 0).all()


def test_noise_has_its_deviation():
    layer = of(8)
    layer.train()
    layer.sigma = 0.2  # some steps of its grid, so that rounding hides little of it
    torch.manual_seed(0)
    drawn = torch.stack([layer(torch.eye(32)).T for _ in range(50)]).detach()
    still = layer.weight.abs() < 0.3  # where the scale's own noise moves little
    assert float(drawn.std(0)[still].median()) == pytest.approx(0.2, rel=0.2)


def test_learning_lowers_the_loss_and_moves_scales_too():
    torch.manual_seed(0)
    layer, x = of(2), torch.randn(200, 32)
    target = torch.randn(24, 32)
    optimizer = torch.optim.AdamW(layer.parameters(), 2e-2, weight_decay=0)
    s, losses = layer.s.detach().clone(), []
    for _ in range(60):
        loss = (layer(x) - x @ target.T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0] and not torch.equal(s, layer.s)


def test_a_copy_learns_by_itself():
    layer = of(2)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.w.add_(10.0)
    assert torch.equal(layer.weight, of(2).weight) and not torch.equal(other.weight, layer.weight)


def test_layers_are_found_by_name():
    assert list(layers(torch.nn.ModuleDict({"a": of(2), "b": torch.nn.Linear(2, 2)}))) == ["a"]
