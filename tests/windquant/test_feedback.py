import pytest
import torch

from windquant import scales
from windquant.feedback import DAMP, Moments, factor, order, round_with_feedback
from windquant.grids import GRIDS, decode, encode
from windquant.quantize import pack_matrix, quantize_matrix
from windquant.salient import Protection, protect

CHUNK = 16
MIXED = [2, 1, 16, 1.58, 3, 8, 4, 2]


def matrix(rows=12, columns=120, seed=0):
    """Weights, and moments of inputs that are much alike."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2000, columns, generator=g) @ (0.3 * torch.randn(columns, columns, generator=g)) + 1
    return torch.randn(rows, columns, generator=g), x.T @ x / 2000


def feedback(w, H, bits):
    moments = Moments.of(H, CHUNK)
    return pack_matrix(round_with_feedback(w, moments, bits), CHUNK)[1], moments.factor


def error(e, H):
    return float(torch.einsum("rc,cd,rd->", e, H, e))


def by_elimination(w, H, bits):
    """GPTQ as OBQ states it, float64: after each column the inverse moments of those left, by Gaussian elimination."""
    w, H, out = w.double(), H.double(), torch.empty_like(w).double()
    columns = order(H, CHUNK)
    left = torch.cat(columns)
    inverse = torch.linalg.inv(H + DAMP[0] * H.diagonal().mean() * torch.eye(len(H)))[left][:, left]
    for c in columns:
        grid, S = GRIDS[bits[int(c[0]) // CHUNK]], inverse[: len(c), : len(c)].inverse()
        s = scales.from_log8(*scales.to_log8(scales.fit(w[None, :, c], S[None], grid)[0]))[0].double()
        for j in c:
            x = w[:, j, None].clone()
            q = decode(encode(x, s, grid), s, grid)
            out[:, j] = q[:, 0]
            w[:, left] -= (x - q) / inverse[0, 0] * inverse[0]
            inverse = inverse[1:, 1:] - torch.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
            left = left[1:]
    return out


def test_strong_inputs_come_first_and_units_stay_together():
    power = torch.tensor([1.0, 5, 2, 9, 8, 7, 3, 0, 0])
    assert [c.tolist() for c in order(power.diag(), 3)] == [[3, 4, 5], [1, 2, 0], [6, 7, 8]]


@pytest.mark.parametrize("bits", [[2] * 8, [3] * 8, [2, 1, 4, 1.58, 3, 8, 4, 2]])
def test_it_is_the_elimination_of_one_column_after_another(bits):
    """Both in float64: in float32 a near tie goes the other way now and then, and changes all that follows."""
    w, H = (t.double() for t in matrix())
    ours, reference = feedback(w, H, bits)[0], by_elimination(w, H, bits)
    assert torch.allclose(ours.double(), reference, rtol=1e-6)


def test_what_sixteen_bits_round_off_is_passed_on_too():
    """Against leaving the unit as it is: the units after it can but gain from knowing its error."""
    w, H = matrix()
    w = 1e-3 + 1000 * w  # where float16 is coarse
    dense = feedback(w, H, [16] * 8)[0]
    assert error(dense - w, H) < error(w.half().float() - w, H)


def test_without_correlations_it_rounds_to_nearest():
    w, _ = matrix()
    for u, unit in enumerate(round_with_feedback(w, Moments.of(torch.eye(120), CHUNK), [2] * 8)):
        part = w[None, :, u * CHUNK : (u + 1) * CHUNK]
        assert torch.equal(unit.values, encode(part, unit.scales(), GRIDS[2]))


@pytest.mark.parametrize("bits", [1, 1.58, 2, 3, 4, 8])
def test_it_beats_rounding_to_nearest_on_correlated_inputs(bits):
    w, H = matrix()
    nearest = quantize_matrix(w, H, [bits] * 8, CHUNK)[1]
    assert error(feedback(w, H, [bits] * 8)[0] - w, H) < 0.75 * error(nearest - w, H)


def test_dead_channels_and_dead_rows_do_no_harm():
    w, H = matrix()
    H[3], H[:, 3], w[5], w[7] = 0, 0, 0, 0.25
    dense, found = feedback(w, H, MIXED)
    assert found.damp == DAMP[0] and bool(torch.isfinite(dense).all())
    assert torch.equal(dense[5], torch.zeros(120))


def test_moments_of_low_rank_are_damped_and_not_given_up():
    w, _ = matrix()
    x = torch.randn(5, 120, generator=torch.Generator().manual_seed(1))
    assert feedback(w, x.T @ x, MIXED)[1].damp == DAMP[0]


def test_indefinite_moments_are_damped_more_and_more():
    w, H = matrix()
    H = H - 0.05 * H.diagonal().mean() * torch.eye(120)
    assert feedback(w, H, MIXED)[1].damp > DAMP[0]


def test_hopeless_moments_fall_back_to_rounding_and_say_so():
    w, H = matrix()
    H = torch.full_like(H, 3).fill_diagonal_(1)
    dense, found = feedback(w, H, MIXED)
    assert found.U is None
    assert torch.equal(dense, quantize_matrix(w, H, MIXED, CHUNK)[1])


def test_no_inputs_at_all_fall_back_too():
    w, H = matrix()
    assert feedback(w, torch.zeros_like(H), MIXED)[1].U is None


def test_moments_with_nan_are_refused():
    _, H = matrix()
    H[1, 2] = float("nan")
    with pytest.raises(ValueError, match="moments hold NaN or Inf"):
        factor(H)


@pytest.mark.parametrize("mode", ["weights", "columns"])
@pytest.mark.parametrize("bits", [[2] * 8, MIXED])
def test_salient_weights_are_constants_whose_error_is_passed_on(mode, bits):
    """What the other columns can do about the INT8 values is done: the error falls beside rounding to nearest."""
    w, H = matrix()
    salient = protect(w, H.diagonal().sqrt(), Protection(mode, 0.05))
    units = round_with_feedback(w, Moments.of(H, CHUNK), bits, salient)
    packed, dense = pack_matrix(units, CHUNK, salient)
    nearest = quantize_matrix(w, H, bits, CHUNK, salient)[1]
    mask = salient.mask()
    assert torch.equal(dense[mask], nearest[mask]) and torch.equal(packed.dequantize(), dense)
    assert error(dense - w, H) < 0.75 * error(nearest - w, H)
