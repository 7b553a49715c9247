import pytest

from windquant.grids import WIDTHS
from windquant.units import Matrix, Unit, bits_range, budget_bytes, chunk_size_for, cut, effective_bits, sizes, weights_in

BODY = cut([Matrix("layers.0.q_proj", 0, 10, 150), Matrix("layers.1.up_proj", 1, 20, 64)], 64)


def test_the_last_unit_is_narrower():
    assert [(u.first_column, u.columns) for u in BODY] == [(0, 64), (64, 64), (128, 22), (0, 64)]
    assert weights_in(BODY) == 10 * 150 + 20 * 64


def test_bytes_by_hand():
    """2 bits: 10 x 64 / 4 of codes, 10 of scales, 4 of their range, 1 in the plan. 16 bits: no scales."""
    unit = BODY[0]
    assert unit.size(2) == 160 + 10 + 4 + 1
    assert unit.size(3) == 240 + 15
    assert unit.size(16) == 1280 + 1
    assert Unit(unit.matrix, 0, 7).size(1.58) == 14 + 15


def test_the_table_of_sizes_grows_with_the_width():
    table = sizes(BODY)
    assert table.shape == (4, len(WIDTHS)) and (table.diff(dim=1) > 0).all()


def test_a_budget_buys_no_more_than_its_bits():
    for target in (1.9, 2.25, 3.1, 7.77):
        assert effective_bits(budget_bytes(target, BODY), weights_in(BODY)) <= target


def test_what_salient_weights_take_is_not_there_to_spend():
    assert budget_bytes(3, BODY, 100) == budget_bytes(3, BODY) - 100
    low, high = bits_range(BODY)
    extra = effective_bits(100, weights_in(BODY))
    assert bits_range(BODY, 100) == pytest.approx((low + extra, high + extra))


def test_salient_weights_that_leave_too_little_are_refused():
    with pytest.raises(ValueError, match="target_bits 3 is out of reach.*scales and salient weights counted"):
        budget_bytes(3, BODY, 800)


@pytest.mark.parametrize("target", [0.9, 17.0])
def test_a_target_out_of_reach_names_floor_and_ceiling(target):
    floor, ceiling = bits_range(BODY)
    with pytest.raises(
        ValueError, match=rf"target_bits {target:g} is out of reach.*between {floor:.2f}\d* and {ceiling:.2f}"
    ):
        budget_bytes(target, BODY)


def test_chunk_size_follows_the_model():
    assert (chunk_size_for(135_000_000), chunk_size_for(1_000_000_000)) == (64, 256)
