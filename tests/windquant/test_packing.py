import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windquant.grids import GRIDS
from windquant.packing import pack, unpack

SCALED = [g for g in GRIDS.values() if g.has_scale]


@pytest.mark.parametrize("grid", SCALED, ids=lambda g: f"{g.bits:g}")
@given(weights=st.integers(1, 90), units=st.integers(1, 4), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_unpack_inverts_pack_and_sizes_are_as_planned(grid, weights, units, seed):
    c = torch.randint(grid.levels, (units, weights), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack(c, grid)
    assert packed.dtype == torch.uint8 and packed.shape == (units, grid.code_bytes(weights))
    assert torch.equal(unpack(packed, weights, grid), c)


def test_bytes_of_a_thousand_weights():
    sizes = {b: GRIDS[b].code_bytes(1000) for b in GRIDS}
    assert sizes == {1: 125, 1.58: 200, 2: 250, 3: 375, 4: 500, 8: 1000, 16: 2000}
