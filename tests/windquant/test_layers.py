import copy

import pytest
import torch
import torch.nn.functional as F

from windquant import embeddings, layers
from windquant.layers import PackedEmbedding, PackedLinear
from windquant.quantize import quantize_matrix
from windquant.salient import Protection, protect
from windquant.units import Matrix

WIDTHS = (1, 1.58, 2, 3, 4, 8, 16)
PROTECTIONS = [Protection("weights", 0.03), Protection("columns", 0.03)]
SHAPES = [(40, 7 * 32 + 19, 32), (37, 7 * 15 + 4, 15), (64, 576, 64)]
"""rows, columns, chunk size: a narrower last unit, rows and chunks that fill no byte and no register, and neither."""


def fill(layer, packed):
    layer.load_state_dict(packed.tensors(), strict=False, assign=True)
    return layer


def packed_linear(rows, columns, chunk, bits=None, seed=0, bias=False, protection=None):
    """A layer of the bits given, else of all widths mixed, and its dense weights."""
    generator = torch.Generator().manual_seed(seed)
    units = -(-columns // chunk)
    mixed = [WIDTHS[int(i)] for i in torch.randint(0, 7, (units,), generator=generator)]
    w = torch.randn(rows, columns, generator=generator)
    salient = protect(w, torch.ones(columns), protection) if protection else None
    packed, dense = quantize_matrix(w, torch.eye(columns), [bits] * units if bits else mixed, chunk, salient)
    layer = fill(PackedLinear(rows, columns, chunk, packed.symbols, bias, protection), packed)
    assert isinstance(layer, PackedLinear) and torch.equal(packed.dequantize(), dense)
    return layer, dense


@pytest.mark.parametrize("protection", PROTECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_with_salient_weights_many_tokens_give_it_bit_for_bit(shape, protection):
    layer, dense = packed_linear(*shape, protection=protection)
    x = torch.randn(2, layers.FEW, shape[1], generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer(x), F.linear(x, dense))


@pytest.mark.parametrize("protection", PROTECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [2, None])
@pytest.mark.parametrize("tokens", [1, layers.FEW])
def test_with_salient_weights_few_tokens_give_it_up_to_the_order_of_rounding(shape, bits, tokens, protection):
    layer, dense = packed_linear(*shape, bits, protection=protection)
    x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(1))
    bound = (shape[1] + 2) * torch.finfo(torch.float32).eps * F.linear(x.abs().double(), dense.abs().double())
    assert ((layer(x).double() - F.linear(x.double(), dense.double())).abs() <= bound).all()


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_salient_weights_stay_packed(protection):
    """Nothing lies in memory but what is in the file."""
    layer, _ = packed_linear(64, 576, 64, protection=protection)
    layer(torch.randn(1, 576)), layer(torch.randn(layers.FEW + 1, 576))
    stored = sum(t.nbytes for name, t in layer.named_buffers() if name.startswith("salient"))
    assert stored == protection.size(Matrix("m", 0, 64, 576))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [*WIDTHS, None])
def test_many_tokens_give_the_dense_layers_output_bit_for_bit(shape, bits):
    layer, dense = packed_linear(*shape, bits)
    x = torch.randn(2, layers.FEW, shape[1], generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer(x), F.linear(x, dense))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [*WIDTHS, None])
@pytest.mark.parametrize("tokens", [1, layers.FEW])
def test_few_tokens_give_it_up_to_the_order_of_rounding(shape, bits, tokens):
    """A sum of n products is off by at most n eps sum |w x|, whatever its order; scaling adds two roundings."""
    layer, dense = packed_linear(*shape, bits)
    x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(1))
    bound = (shape[1] + 2) * torch.finfo(torch.float32).eps * F.linear(x.abs().double(), dense.abs().double())
    assert ((layer(x).double() - F.linear(x.double(), dense.double())).abs() <= bound).all()


@pytest.mark.parametrize("protection", [None, *PROTECTIONS])
@pytest.mark.parametrize("tokens", [1, layers.FEW + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_within_its_own_rounding(dtype, tokens, protection):
    """Weights, each unit's sum and the output are rounded once: at most three eps of sum |w x|."""
    layer, dense = packed_linear(64, 576, 64, protection=protection)
    x = torch.randn(tokens, 576, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact, size = F.linear(x.double(), dense.double()), F.linear(x.double().abs(), dense.double().abs())
    assert layer(x).dtype == dtype
    assert ((layer(x).double() - exact).abs() <= 3 * torch.finfo(dtype).eps * size).all()


@pytest.mark.parametrize("tokens", [1, layers.FEW + 1])
def test_a_bias_is_added(tokens):
    layer, _ = packed_linear(40, 96, 32, bias=True)
    x = torch.randn(tokens, 96)
    without = layer(x)
    assert layer.bias is not None
    layer.bias.data.fill_(1.5)
    torch.testing.assert_close(layer(x), without + 1.5)


@pytest.mark.parametrize(
    "cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.float(), lambda m: m.double()]
)
@pytest.mark.parametrize("protection", [None, *PROTECTIONS])
def test_a_cast_leaves_what_is_stored(cast, protection):
    layer, dense = packed_linear(40, 96, 32, bias=True, protection=protection)
    stored = {k: v.clone() for k, v in layer.state_dict().items() if k != "bias"}
    there_and_back = cast(copy.deepcopy(layer)).to(torch.float32)
    found = there_and_back.state_dict()
    assert all(found[k].dtype == v.dtype and torch.equal(found[k], v) for k, v in stored.items())
    assert torch.equal(there_and_back.dequantize(), dense)


@pytest.mark.parametrize("bits", embeddings.BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_that_are_looked_up_are_the_dense_tables(shape, bits):
    rows, columns, chunk = shape
    packed, dense = embeddings.quantize(torch.randn(rows, columns), bits, chunk)
    layer = fill(PackedEmbedding(rows, columns, chunk, packed.symbols), packed)
    ids = torch.tensor([[0, rows - 1, 3], [3, 3, 17]])
    assert torch.equal(layer.dequantize(), dense)
    assert torch.equal(layer(ids), dense[ids])
    assert torch.equal(layer.bfloat16()(ids), dense[ids].bfloat16())


@pytest.mark.parametrize("bits", embeddings.BITS)
def test_an_embedding_is_rounded_to_nearest(bits):
    """No row errs by more than a level and its scale's 1.7 %: relative error about 2^-bits."""
    w = torch.randn(300, 64)
    _, dense = embeddings.quantize(w, bits, 32)
    assert (dense - w).norm() / w.norm() < 2.0 ** -(bits - 1)


@pytest.mark.parametrize("protection", [None, *PROTECTIONS])
@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1.58, 1])
def test_in_float16_large_activations_do_not_overflow_before_the_scale(bits, protection):
    """Weights below 1e-2 and activations of 3,000 that add up: a unit's sum of points passes 65,504, the output does not."""
    layer, dense = packed_linear(64, 576, 64, bits, protection=protection)
    layer.span[:, 0] -= 8  # in octaves
    if protection:
        layer.salient_span[:, 0] -= 8
    x = (3000 * dense[:1].sign()).half()
    expected, w = layer.dequantize().double() @ x[0].double(), layer.dequantize().double().abs()
    assert float(expected.abs().max()) < 65504
    assert ((layer(x)[0].double() - expected).abs() <= 3e-3 * (w @ x[0].double().abs())).all()


def test_a_layers_weight_has_the_models_dtype():
    layer, dense = packed_linear(64, 576, 64)
    assert layer.weight.dtype == torch.float32 and layer.bfloat16().weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight, dense.bfloat16())


def test_unpacked_few_tokens_too_give_the_dense_layers_output_bit_for_bit():
    layer, dense = packed_linear(64, 576, 64)
    x = torch.randn(3, 576)
    with layers.unpacked(layer):
        assert torch.equal(layer(x), F.linear(x, dense))
    assert layer.few == layers.FEW


def test_ids_out_of_range_are_refused():
    packed, _ = embeddings.quantize(torch.randn(40, 64), 8, 32)
    layer = fill(PackedEmbedding(40, 64, 32, packed.symbols), packed)
    for ids in ([-1], [40]):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            layer(torch.tensor(ids))


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_weights_loaded_later_are_those_that_count(protection):
    """Although some of the earlier ones were kept unpacked after the first token."""
    layer, _ = packed_linear(64, 576, 64, 2, protection=protection)
    other, dense = packed_linear(64, 576, 64, 2, seed=1, protection=protection)
    x = torch.randn(1, 576)
    layer(x)
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(layer(x), F.linear(x, dense), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("protection", [None, *PROTECTIONS])
def test_after_inference_gradients_reach_the_input(protection):
    layer, dense = packed_linear(64, 576, 64, protection=protection)
    with torch.inference_mode():
        layer(torch.randn(1, 576))
    x = torch.randn(2, 576, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, dense.sum(0).expand(2, -1), atol=1e-3, rtol=1e-3)
