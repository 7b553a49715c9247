import pytest
import torch

from windquant.grids import BY_SYMBOL, GRIDS
from windquant.quantize import PackedMatrix, quantize_matrix, round_units

MIXED = [2, 1, 16, 1.58, 3, 8, 4, 2]
CHUNK = 16


def matrix(rows=12, columns=120, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(500, columns, generator=g)
    return torch.randn(rows, columns, generator=g), x.T @ x / 500


def test_unpacked_weights_equal_the_rounded_ones_bit_for_bit():
    """All seven widths in one matrix, the last unit narrower (120 = 7 x 16 + 8)."""
    w, H = matrix()
    packed, dense = quantize_matrix(w, H, MIXED, CHUNK)
    assert packed.symbols == "".join(GRIDS[b].symbol for b in MIXED)
    assert torch.equal(packed.dequantize(), dense)


@pytest.mark.parametrize("bits", list(GRIDS))
def test_stored_bytes_are_what_the_unit_counts(bits):
    from windquant.units import Matrix, cut

    w, H = matrix()
    packed, _ = quantize_matrix(w, H, [bits] * 8, CHUNK)
    planned = sum(u.size(bits) for u in cut([Matrix("m", 0, 12, 120)], CHUNK))
    assert packed.codes.nbytes + packed.scale.nbytes + packed.span.nbytes + len(packed.symbols) == planned


def test_more_bits_less_error():
    w, H = matrix()
    errors = [float((quantize_matrix(w, H, [b] * 8, CHUNK)[1] - w).square().mean()) for b in GRIDS]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-6


def test_a_unit_does_not_depend_on_its_neighbours_widths():
    w, H = matrix()
    other = [8 if i != 4 else b for i, b in enumerate(MIXED)]
    columns = slice(4 * CHUNK, 5 * CHUNK)
    assert torch.equal(
        quantize_matrix(w, H, MIXED, CHUNK)[1][:, columns], quantize_matrix(w, H, other, CHUNK)[1][:, columns]
    )


def test_the_input_is_left_alone():
    w, H = matrix()
    before = w.clone(), H.clone()
    quantize_matrix(w, H, MIXED, CHUNK)
    assert torch.equal(w, before[0]) and torch.equal(H, before[1])


def test_sixteen_bits_refuse_what_float16_cannot_hold():
    with pytest.raises(ValueError, match="70000 does not fit the 16-bit format"):
        round_units(torch.full((1, 2, 2), 70000.0), torch.eye(2)[None], 16)


@pytest.mark.parametrize(("symbols", "message"), [("22x2222f", "not 8 of the letters"), ("222", "not 8 of the letters"),
                                                  ("33333333", "do not fit the plan")])  # fmt: skip
def test_a_plan_that_does_not_fit_the_tensors_is_refused(symbols, message):
    w, H = matrix()
    p, _ = quantize_matrix(w, H, MIXED, CHUNK)
    with pytest.raises(ValueError, match=message):
        PackedMatrix(p.rows, p.columns, CHUNK, symbols, p.codes, p.scale, p.span)


def test_symbols_are_unique():
    assert len(BY_SYMBOL) == len(GRIDS) == 7
