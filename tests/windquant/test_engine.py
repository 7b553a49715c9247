import pytest
import torch

from tasks.models import skeleton
from tests.conftest import MemoryScratch, architecture, source_of, walk_of
from windquant.blocks import Walk, matrices
from windquant.engine import Engine
from windquant.errors import InputError
from windquant.quantize import quantize_matrix
from windquant.reconstruct import ReconstructConfig
from windquant.salient import Protection, protect

CHUNK = 32
WINDOWS = torch.randint(300, (8, 24), generator=torch.Generator().manual_seed(0))
MIXED = (2, 3, 1.58)
RECONSTRUCTION = ReconstructConfig(steps=40, batch=4)


def unprotected(block, name, w):
    return None


def protecting(mode):
    return lambda block, name, w: protect(w, torch.ones(w.shape[1]), Protection(mode, 0.05))


def engine(walk, scratch, config, bits=MIXED, salient=unprotected):
    widths = {m.name: list(bits)[: -(-m.columns // CHUNK)] for m in matrices(walk.model)}
    return Engine(walk, lambda name: widths[name], CHUNK, config, 0, scratch, "plan", pytest.fail, salient)


def run(walk, scratch, config, report=lambda done, total: None, salient=unprotected):
    blocks = engine(walk, scratch, config, salient=salient).run(WINDOWS, report)
    return {n: p for block in blocks for n, p in block.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n].dequantize(), b[n].dequantize()) for n in a)


def output_error(scratch):
    """Of the last block, relative to what both streams hold."""
    streams = scratch.get("plan-streams-1")
    return float((streams["quantized"] - streams["reference"]).square().mean())


@pytest.mark.parametrize("salient", [unprotected, protecting("weights")], ids=["none", "salient"])
@pytest.mark.parametrize("config", [None, RECONSTRUCTION], ids=["feedback", "reconstruction"])
def test_a_run_killed_after_any_block_ends_the_same_bit_for_bit(walk, config, salient):
    whole = run(walk, MemoryScratch(), config, salient=salient)

    class Killed(Exception):
        pass

    class Dying(MemoryScratch):
        puts, last = 0, 1

        def put(self, name, tensors):
            if self.puts == self.last:
                raise Killed
            self.puts += 1
            super().put(name, tensors)

    for last in range(4):  # before and after each of the two things that a block puts away
        scratch = Dying()
        scratch.last = last
        with pytest.raises(Killed):
            run(walk, scratch, config, salient=salient)
        scratch.last = 10**9
        assert same(run(walk, scratch, config, salient=salient), whole)


@pytest.mark.parametrize("mode", ["weights", "columns"])
@pytest.mark.parametrize("config", [None, RECONSTRUCTION], ids=["feedback", "reconstruction"])
def test_salient_weights_are_what_they_were_chosen_to_be(walk, config, mode):
    packed = run(walk, MemoryScratch(), config, salient=protecting(mode))
    for name, w in walk.source(lambda n: n.removesuffix(".weight") in packed).items():
        p, expected = packed[name.removesuffix(".weight")], torch.zeros_like(w)
        salient = protecting(mode)(0, name, w)
        salient.place_(expected)
        assert torch.equal(p.dequantize()[salient.mask()], expected[salient.mask()])


def test_protecting_single_weights_brings_the_output_nearer(walk):
    """At equal widths, that is, at more bytes."""
    scratches = [MemoryScratch() for _ in range(2)]
    for scratch, salient in zip(scratches, (unprotected, protecting("weights")), strict=True):
        run(walk, scratch, RECONSTRUCTION, salient=salient)
    assert output_error(scratches[1]) < output_error(scratches[0])


def test_the_same_seed_gives_the_same_weights(walk):
    assert same(run(walk, MemoryScratch(), RECONSTRUCTION), run(walk, MemoryScratch(), RECONSTRUCTION))


def test_reconstruction_is_nearer_to_the_reference_than_feedback(walk):
    scratches = [MemoryScratch() for _ in range(2)]
    for scratch, config in zip(scratches, (None, RECONSTRUCTION), strict=True):
        run(walk, scratch, config)
    reference = scratches[1].get("plan-streams-1")["reference"]  # error feedback has no such stream
    feedback, reconstruction = (s.get("plan-streams-1")["quantized"] for s in scratches)
    assert (reconstruction - reference).square().mean() < 0.8 * (feedback - reference).square().mean()


def test_the_reference_stream_is_the_reference(walk, tiny):
    scratch = MemoryScratch()
    run(walk, scratch, RECONSTRUCTION)
    hidden = tiny.model(WINDOWS, use_cache=False, output_hidden_states=True).hidden_states[1]
    expected = scratch.get("plan-streams-0")["reference"]
    # bfloat16 products, float32 sums: 2^-8 a product, and a block's outputs are sums of some hundred.
    assert torch.allclose(hidden, expected, atol=2e-2)


def test_progress_counts_blocks(walk):
    seen = []
    run(walk, MemoryScratch(), None, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.parametrize(("config", "sentence"), [
    (None, "input of mlp.down_proj in block 1 holds NaN or Inf"),
    (RECONSTRUCTION, "block 1 puts out NaN or Inf on the reference's activations"),
])  # fmt: skip
def test_a_block_with_a_weight_that_is_not_a_number_is_named(tiny, config, sentence):
    tiny.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    walk = Walk(skeleton(tiny.config), source_of(tiny), torch.device("cpu"))
    with pytest.raises(InputError, match=sentence):
        run(walk, MemoryScratch(), config)


@pytest.mark.parametrize("config", [None, RECONSTRUCTION], ids=["feedback", "reconstruction"])
def test_a_matrix_that_cannot_be_rounded_is_named(tiny, config):
    tiny.model.layers[0].self_attn.v_proj.weight.data[3, 4] = 70000
    walk = Walk(skeleton(tiny.config), source_of(tiny), torch.device("cpu"))
    with pytest.raises(InputError, match=r"model\.layers\.0\.self_attn\.v_proj: a weight of 7.* does not fit the 16-bit"):
        list(engine(walk, MemoryScratch(), config, bits=(16, 16, 16)).run(WINDOWS, lambda done, total: None))


def test_what_comes_out_is_of_the_plans_widths(walk):
    packed = run(walk, MemoryScratch(), RECONSTRUCTION)
    assert {p.symbols for p in packed.values()} == {"23", "23t"}
    w = walk.model.get_submodule("model.layers.0.mlp.up_proj")
    assert packed["model.layers.0.mlp.up_proj"].columns == w.in_features
    assert quantize_matrix(torch.zeros(2, 64), torch.eye(64), [2, 3], CHUNK)[0].symbols == "23"


@pytest.mark.parametrize("config", [None, RECONSTRUCTION], ids=["feedback", "reconstruction"])
def test_experts_that_no_token_calls_are_quantized_too(config):
    model = architecture("mixtral", num_experts_per_tok=1)
    for block in model.model.layers:
        block.mlp.gate.weight[1] = -block.mlp.gate.weight[0].normal_()  # one of two opposite rows is above zero
        block.mlp.gate.weight[2:] = 0
    walk = walk_of(model)
    packed = run(walk, MemoryScratch(), config)
    assert packed.keys() == {m.name for m in matrices(walk.model)}
    weights = {n: t for n, t in walk.source(lambda name: True).items() if "experts.3" in n}
    errors = [(packed[n.removesuffix(".weight")].dequantize() - w).norm() / w.norm() for n, w in weights.items()]
    assert len(errors) == 6 and max(errors) < 0.7  # widths of 2, 3 and 1.58 bits
