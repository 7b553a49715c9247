import pytest
import torch

from windquant.quantize import PARTS, PackedMatrix, quantize_matrix
from windquant.salient import Protection, Salient, protect, protection, total_size
from windquant.scales import from_log8
from windquant.units import Matrix, cut

MODES = ("weights", "columns")
CHUNK = 16
MIXED = [2, 1, 16, 1.58, 3, 8, 4, 2]


def matrix(rows=12, columns=120, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(500, columns, generator=g)
    return torch.randn(rows, columns, generator=g), x.T @ x / 500, x.abs().mean(0)


def protected(mode, share=0.03, **shape):
    w, H, a = matrix(**shape)
    return w, H, protect(w, a, Protection(mode, share))


def test_single_weights_are_the_largest_by_weight_times_activation():
    w, _, a = matrix()
    a = torch.linspace(0.1, 3, 120)
    mask = protect(w, a, Protection("weights", 0.03)).mask()
    score = w.abs() * a
    assert int(mask.sum()) == round(0.03 * w.numel())
    assert score[mask].min() >= score[~mask].max()


def test_columns_are_the_largest_by_the_sum_of_squares():
    w, _, a = matrix()
    mask = protect(w, a, Protection("columns", 0.05)).mask()
    power = (w.abs() * a).square().sum(0)
    assert torch.equal(mask.any(0), mask.all(0)) and int(mask[0].sum()) == 6
    assert power[mask[0]].min() >= power[~mask[0]].max()


@pytest.mark.parametrize("mode", MODES)
def test_of_equals_the_first_are_chosen(mode):
    salient = protect(torch.ones(4, 100), torch.ones(100), Protection(mode, 0.05))
    assert torch.equal(salient.index(), torch.arange(20 if mode == "weights" else 5))


@pytest.mark.parametrize("mode", MODES)
def test_a_protected_weight_is_within_half_a_step_of_int8(mode):
    """A row's scale is at most its largest weight / 124, stored to 1.7 %."""
    w, _, salient = protected(mode)
    dense = torch.zeros_like(w)
    salient.place_(dense)
    mask = salient.mask()
    step = (w.abs() * mask).amax(1, keepdim=True) / 124 * 1.017
    assert bool(((dense - w).abs() <= step / 2 * 1.001)[mask].all())
    assert torch.equal(dense[~mask], torch.zeros(int((~mask).sum())))


@pytest.mark.parametrize("mode", MODES)
def test_protected_weights_are_the_same_whatever_the_plan(mode):
    w, H, salient = protected(mode)
    dense = [quantize_matrix(w, H, bits, CHUNK, salient)[1] for bits in (MIXED, [1] * 8, [16] * 8)]
    mask = salient.mask()
    assert all(torch.equal(d[mask], dense[0][mask]) for d in dense)


@pytest.mark.parametrize("mode", MODES)
def test_unpacked_weights_equal_the_rounded_ones_bit_for_bit(mode):
    w, H, salient = protected(mode)
    packed, dense = quantize_matrix(w, H, MIXED, CHUNK, salient)
    assert torch.equal(packed.dequantize(), dense)
    again = type(packed).of(12, 120, CHUNK, packed.symbols, packed.tensors())
    assert torch.equal(again.dequantize(), dense)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(12, 120), (7, 33), (64, 576), (3, 5)])
def test_stored_bytes_follow_from_the_shape(mode, shape):
    _, _, salient = protected(mode, rows=shape[0], columns=shape[1])
    protection = Protection(mode, 0.03)
    assert {p: tuple(t.shape) for p, t in salient.tensors().items()} == protection.shapes(*shape)
    assert sum(t.nbytes for t in salient.tensors().values()) == protection.size(Matrix("m", 0, *shape))


def test_bytes_by_hand():
    """Of 64 x 576: 1,106 weights in INT8, positions of 5 + 1 + 36,864 / 32 / 1,106 bits, 64 scales, their range. Columns:
    17 x 64, positions of 5 + 1 + 19 / 17 bits."""
    m = Matrix("m", 0, 64, 576)
    assert Protection("weights", 0.03).size(m) == 1106 + -(-(6 * 1106 + 1152 + 1) // 8) + 64 + 4
    assert Protection("columns", 0.03).size(m) == 17 * 64 + -(-(6 * 17 + 18 + 1) // 8) + 64 + 4


def test_a_matrix_is_counted_once_however_many_units_it_has():
    body = cut([Matrix("a", 0, 64, 576), Matrix("b", 0, 64, 576)], 64)
    assert total_size(Protection("weights", 0.03), body) == 2 * Protection("weights", 0.03).size(body[0].matrix)
    assert total_size(None, body) == 0


@pytest.mark.parametrize("mode", MODES)
def test_every_protected_weight_is_in_one_unit(mode):
    _, _, salient = protected(mode)
    mask = salient.mask()
    assert salient.counts(CHUNK) == [int(part.sum()) for part in mask.split(CHUNK, 1)]


def test_scales_are_fitted_to_what_is_left():
    """A weight 1,000 times the others ruins its row's scale, unless it is protected."""
    w, H, a = matrix()
    w[5, 7] = 1000
    rest = [i for i in range(16) if i != 7]
    plain = quantize_matrix(w, H, [3] * 8, CHUNK)[1]
    salient = protect(w, a, Protection("weights", 0.001))
    saved = quantize_matrix(w, H, [3] * 8, CHUNK, salient)[1]
    assert (plain - w)[5, rest].norm() > 3 * (saved - w)[5, rest].norm()


def test_a_matrix_of_zeros_stays_zero():
    salient = protect(torch.zeros(4, 40), torch.ones(40), Protection("weights", 0.03))
    dense = torch.ones(4, 40)
    salient.place_(dense)
    assert float(dense.sum()) == 160 - 5


@pytest.mark.parametrize(("given", "message"), [(("rows", 0.03), "salient 'rows' is unknown; choose one of none, weights"),
                                                (("weights", 0.2), "salient_share 0.2 is not between 0.0001 and 0.1"),
                                                (("columns", 0.0), "salient_share 0 is not between")])  # fmt: skip
def test_settings_out_of_range_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        protection(*given)


def test_numbers_that_are_none_are_refused():
    w, _, a = matrix()
    a[3] = float("inf")
    with pytest.raises(ValueError, match="the weights or the activation scales hold NaN or Inf"):
        protect(w, a, Protection("weights", 0.03))


@pytest.mark.parametrize("part", ["salient_positions", "salient_codes", "salient_scale", "salient_span"])
@pytest.mark.parametrize("mode", MODES)
def test_tensors_that_do_not_belong_together_are_refused(mode, part):
    _, _, salient = protected(mode)
    tensors = salient.tensors()
    with pytest.raises(ValueError, match="salient tensors .* do not fit a matrix of 12 x 120"):
        Salient.of(12, 120, tensors | {part: tensors[part][..., :-2]})


def test_a_missing_part_is_named():
    _, _, salient = protected("weights")
    tensors = salient.tensors()
    del tensors["salient_scale"]
    with pytest.raises(ValueError, match="of its salient weights salient_scale is missing"):
        Salient.of(12, 120, tensors)


@pytest.mark.parametrize("mode", ["weights", "columns"])
def test_the_code_in_a_salient_weights_place_is_0(mode):
    w = torch.randn(40, 96)
    salient = protect(w, torch.ones(96), Protection(mode, 0.05))
    packed, _ = quantize_matrix(w, torch.eye(96), [4, 8, 4], 32, salient)
    bare = PackedMatrix.of(40, 96, 32, packed.symbols, {p: getattr(packed, p) for p in PARTS}).dequantize()
    s = torch.cat([t.expand(-1, c) for t, c in zip(from_log8(packed.scale, packed.span), (32, 32, 32), strict=True)], 1)
    lowest = s * torch.cat([torch.full((40, 32), o) for o in (-8.0, -128.0, -8.0)], 1)
    assert torch.equal(bare[salient.mask()], lowest[salient.mask()])
