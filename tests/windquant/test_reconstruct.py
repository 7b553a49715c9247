import itertools
import math

import pytest
import torch
from torch import nn

from windquant import quantize
from windquant.quantize import pack_matrix
from windquant.reconstruct import Latent, ReconstructConfig, reconstruct
from windquant.salient import Protection, protect

CHUNK = 16
MIXED = [2, 1, 16, 1.58, 3, 8, 4, 2]


def matrix(rows=12, columns=120, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(500, columns, generator=g)
    return torch.randn(rows, columns, generator=g), x.T @ x / 500


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(40, 64, bias=False), nn.Linear(64, 40, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def learned(bits, steps=60, **config):
    """A block, its latents after reconstruction, and its losses."""
    block = Block().requires_grad_(False)
    x = torch.randn(16, 8, 40, generator=torch.Generator().manual_seed(1))
    target = block(x)
    latents = {n: Latent(m.weight, torch.eye(m.in_features), bits * (m.in_features // 8), 8)
               for n, m in block.named_children()}  # fmt: skip
    batches = itertools.cycle([(x[:8], target[:8]), (x[8:], target[8:])])
    return block, latents, reconstruct(block, latents, batches, block, ReconstructConfig(steps, **config))


@pytest.mark.parametrize("bits", [[1], [1.58], [2], [3], [4]])
def test_the_loss_falls(bits):
    _, _, losses = learned(bits)
    assert sum(losses[-4:]) < 0.9 * 2 * sum(losses[:2])


def test_what_is_learned_is_what_is_stored_bit_for_bit():
    w, H = matrix()
    latent = Latent(w, H, MIXED, CHUNK)
    for seed in range(5):
        latent.learn_(torch.randn(w.shape, generator=torch.Generator().manual_seed(seed)), 0.2)
    computed = latent.quantize()
    packed, dense = pack_matrix(latent.rounded(), CHUNK)
    assert torch.equal(dense, computed) and torch.equal(packed.dequantize(), computed)


def test_unlearned_it_is_rounding_to_nearest():
    """No weight is further than half a step off, save those beyond the grid's ends."""
    w, H = matrix()
    latent = Latent(w, H, [3, 4, 8, 3, 4, 8, 3, 4], CHUNK)
    d, q = latent.d(), latent._units(latent.quantize())
    y = latent.y(d)
    inside = (y > -0.5) & (y < latent.top + 0.5)
    assert bool(((q - latent.w).abs() <= d / 2 * 1.001)[inside].all())
    assert float(inside.float().mean()) > 0.9


def test_within_half_a_step_no_weight_moves_further_than_one_point():
    w, H = matrix()
    latent, steps = Latent(w, H, [3] * 8, CHUNK), 20
    before, log = latent.codes(latent.y(latent.d())), latent.log.clone()
    for i in range(steps):
        latent.learn_(torch.ones_like(w), (1 - i / steps) / steps)
        latent.log.copy_(log)  # the scales held still
    moved = before - latent.codes(latent.y(latent.d()))
    assert float(moved.max()) == 1 and float(moved.min()) == 0


def test_a_scale_follows_its_clipped_weights():
    """All weights beyond the grid: a gradient that wants larger weights there raises the scale, else lowers it."""
    w = torch.full((1, 16), 5.0)
    for sign in (1, -1):
        latent = Latent(w, torch.eye(16), [2], CHUNK)
        latent.log.fill_(0.0)
        latent.learn_(torch.full((1, 16), -float(sign)), 0.1)
        assert float(latent.log) * sign > 0


@pytest.mark.parametrize(("bits", "outermost", "move"), [(2, 1.5, 1), (3, 4, 0.5), (4, 8, 0.5), (8, 128, 0.5)])
def test_a_scales_step_takes_its_outermost_level_as_far_as_a_weights_step(bits, outermost, move):
    """In first order; both in steps of the grid."""
    latent = Latent(torch.full((1, 16), -5.0), torch.eye(16), [bits], CHUNK)
    latent.log.zero_()
    latent.learn_(torch.ones(1, 16), 1e-2)
    octaves = float(latent.log.abs())
    assert octaves * math.log(2) * outermost == pytest.approx(1e-2 * move, rel=1e-3)


@pytest.mark.parametrize("bits", [1, 1.58])
def test_no_scale_moves_by_more_octaves_than_the_rate(bits):
    latent = Latent(torch.full((1, 16), -5.0), torch.eye(16), [bits], CHUNK)
    latent.log.zero_()
    latent.learn_(torch.ones(1, 16), 1e-2)
    assert float(latent.log.abs()) == pytest.approx(1e-2, rel=1e-3)


@pytest.mark.parametrize(("bits", "move"), [(1, 1), (1.58, 1), (2, 1), (3, 0.5), (4, 0.5), (8, 0.5)])
def test_weights_of_wide_grids_move_half_as_far(bits, move):
    w, H = matrix(12, 16)
    latent = Latent(w / 8, H, [bits], CHUNK)
    before, d = latent.w.clone(), latent.d()
    latent.learn_(torch.ones(12, 16), 1e-2)
    assert float(((before - latent.w) / d).max()) == pytest.approx(1e-2 * move, rel=1e-3)


def test_a_row_of_zeros_stays_zero():
    w, H = matrix()
    w[4] = 0
    latent = Latent(w, H, MIXED, CHUNK)
    latent.learn_(torch.ones_like(w), 0.5)
    stored = pack_matrix(latent.rounded(), CHUNK)[1]
    assert torch.equal(stored[4], torch.zeros(120))


def test_sixteen_bits_stay_as_they_are():
    w, H = matrix()
    latent = Latent(w, H, [16] * 8, CHUNK)
    latent.learn_(torch.ones_like(w), 0.5)
    assert torch.equal(pack_matrix(latent.rounded(), CHUNK)[1], w.half().float())


def test_a_loss_that_is_not_a_number_stops_it():
    block = Block().requires_grad_(False)
    latents = {"up": Latent(block.up.weight, torch.eye(40), [2] * 5, 8)}
    x = torch.full((1, 2, 40), float("inf"))
    with pytest.raises(ValueError, match="holds NaN or Inf in step 0"):
        reconstruct(block, latents, itertools.repeat((x, x)), block, ReconstructConfig(3))


@pytest.mark.parametrize(("given", "message"), [({"steps": 0}, "steps 0"), ({"batch": 0}, "batch 0"),
                                                ({"rate": 2.0}, "rate 2 is not between 0 and 1")])  # fmt: skip
def test_settings_out_of_range_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ReconstructConfig(**given)


@pytest.mark.parametrize("mode", ["weights", "columns"])
def test_salient_weights_are_held_and_stored_bit_for_bit(mode):
    w, H = matrix()
    salient = protect(w, torch.ones(120), Protection(mode, 0.05))
    latent = Latent(w, H, MIXED, CHUNK, salient)
    first, mask = latent.quantize(), salient.mask()
    for seed in range(5):
        latent.learn_(torch.randn(w.shape, generator=torch.Generator().manual_seed(seed)), 0.2)
    computed = latent.quantize()
    packed, dense = pack_matrix(latent.rounded(), CHUNK, salient)
    assert torch.equal(computed[mask], first[mask]) and not torch.equal(computed, first)
    assert torch.equal(dense, computed) and torch.equal(packed.dequantize(), computed)


def test_a_scale_does_not_follow_salient_weights():
    w = torch.full((1, 16), 0.3)
    w[0, 3] = 5.0
    latent = Latent(w, torch.eye(16), [2], 16, protect(w, torch.ones(16), Protection("weights", 0.05)))
    before = latent.log.clone()
    gradient = torch.zeros(1, 16)
    gradient[0, 3] = -1.0
    latent.learn_(gradient, 0.1)
    assert torch.equal(latent.log, before)


def test_a_few_units_at_a_time_are_all_at_once_bit_for_bit(monkeypatch):
    """A narrower last unit, and one at 16 bits, among them."""
    found = []
    for piece in (1, 500, 1 << 20):
        monkeypatch.setitem(quantize.PIECE, "cpu", piece)
        latent = Latent(*matrix(), MIXED, CHUNK)
        latent.learn_(torch.randn(12, 120, generator=torch.Generator().manual_seed(1)), 0.2)
        found.append(latent.quantize())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
