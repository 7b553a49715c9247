import pytest
import torch

from tests.conftest import MemoryScratch
from windquant import blocks
from windquant.calibrate import calibrate

IDS = torch.arange(60).view(3, 20) % 300


def run(walk, scratch=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return dict(calibrate(walk, IDS, generator, scratch or MemoryScratch(), lambda done, total: None))


def inputs_of(model, name):
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda m, a: seen.append(a[0].flatten(0, -2)))
    model(IDS)
    handle.remove()
    return torch.cat(seen).double()


@pytest.mark.parametrize(
    "name", ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
)
def test_moments_are_the_means_over_all_tokens(tiny, walk, name):
    x = inputs_of(tiny, f"model.layers.1.{name}")
    found = run(walk)[1]
    i = int(found[f"source.{name}"])
    torch.testing.assert_close(found[f"H.{i}"].double(), x.T @ x / len(x), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[f"a.{i}"].double(), x.abs().mean(0), rtol=1e-4, atol=1e-6)


def test_layers_with_one_input_share_one_moment(walk):
    found = run(walk)[0]
    assert len([k for k in found if k.startswith("H.")]) == 4  # q k v | o | gate up | down
    assert found["source.self_attn.q_proj"] == found["source.self_attn.v_proj"] != found["source.self_attn.o_proj"]


def test_fisher_weights_agree_with_autograd_through_the_whole_model(tiny, walk):
    """Same labels: drawn window by window from the model's distribution with the same generator."""
    name, total, generator = "model.layers.0.mlp.gate_proj", torch.zeros(96), torch.Generator().manual_seed(0)
    layer = tiny.get_submodule(name)
    for row in IDS:
        kept = []
        handle = layer.register_forward_hook(lambda m, a, y: kept.append(y.detach().requires_grad_()) or kept[-1])  # noqa: B023
        logp = tiny(row[None]).logits[0].log_softmax(-1)
        handle.remove()
        label = torch.multinomial(logp.detach().exp(), 1, generator=generator)
        (gradient,) = torch.autograd.grad(-logp.gather(-1, label).sum(), kept[0])
        total += gradient[0].square().sum(0)
    torch.testing.assert_close(run(walk)[0]["g.mlp.gate_proj"], total / IDS.numel(), rtol=1e-3, atol=1e-9)


def test_an_interrupted_run_resumes_with_the_same_result(walk):
    whole, scratch, steps = run(walk), MemoryScratch(), []

    class Stopped(Exception):
        pass

    def stop(done, total):
        steps.append(done)
        if done == 4:
            raise Stopped

    with pytest.raises(Stopped):
        list(calibrate(walk, IDS, torch.Generator().manual_seed(0), scratch, stop))
    kept = len(scratch.kept)
    resumed = run(walk, scratch)
    assert kept > 0
    for i, statistics in whole.items():
        for key, value in statistics.items():
            assert torch.equal(resumed[i][key], value), key


def test_an_overflow_is_named(walk):
    original = walk.source

    def broken(wanted):
        tensors = original(wanted)
        if "self_attn.v_proj.weight" in "".join(tensors):
            tensors = {k: v.fill_(float("inf")) if "v_proj" in k else v for k, v in tensors.items()}
        return tensors

    walk.source = broken
    with pytest.raises(ValueError, match=r"input of self_attn\.o_proj in block \d holds NaN or Inf"):
        run(walk)


def test_every_matrix_has_its_statistics(tiny, walk):
    found = run(walk)
    for i, block in enumerate(blocks.decoder_blocks(tiny)[1]):
        for name, linear in blocks.linears(block).items():
            assert found[i][f"g.{name}"].shape == (linear.out_features,)
            assert found[i][f"H.{int(found[i][f'source.{name}'])}"].shape == (linear.in_features,) * 2
