import pytest
import torch

from windquant import blocks, candidates
from windquant.candidates import Fed
from windquant.feedback import Moments, round_with_feedback
from windquant.quantize import pack_matrix
from windquant.salient import Protection, protect
from windquant.units import cut

CHUNK = 40  # of 64 columns: a narrower last unit


def moments(block, name):
    x = torch.randn(300, 96 if name == "mlp.down_proj" else 64, generator=torch.Generator().manual_seed(block)) + 1
    return x.T @ x / 300


def protected(block, name, w):
    return protect(w, torch.ones(w.shape[1]), Protection("weights", 0.05))


def fed(model, protect=lambda block, name, w: None):
    return Fed(model, cut(blocks.matrices(model), CHUNK), moments, protect)


@pytest.mark.parametrize("protect", [lambda block, name, w: None, protected])
def test_every_matrix_is_what_error_feedback_makes_of_it_by_itself(tiny, protect):
    net = fed(tiny, protect)
    plan = [(1, 1.58, 2, 3, 4, 8, 16)[i % 7] for i in range(len(net.body))]
    net.set([2.0] * len(plan))  # something else before
    net.set(plan)
    for m in blocks.matrices(tiny):
        inner = m.name.split(".", 3)[-1]
        bits = [b for u, b in zip(net.body, plan, strict=True) if u.matrix == m]
        w = net.original[m.name]
        salient = protect(m.block, inner, w)
        rounded = round_with_feedback(w, Moments.of(moments(m.block, inner), CHUNK), bits, salient)
        assert torch.equal(tiny.get_submodule(m.name).weight, pack_matrix(rounded, CHUNK, salient)[1])


def test_only_matrices_whose_plan_changes_are_rounded_again(tiny, monkeypatch):
    net, rounded = fed(tiny), []
    real = candidates.round_with_feedback
    monkeypatch.setattr(
        candidates, "round_with_feedback", lambda w, *rest: (rounded.append(tuple(w.shape)), real(w, *rest))[1]
    )
    net.set([2.0] * len(net.body))
    assert len(rounded) == len(net.layers)
    rounded.clear()
    net.set([2.0] * len(net.body))
    assert rounded == []
    net.set([*[2.0] * (len(net.body) - 1), 3.0])
    last = net.body[-1].matrix
    assert rounded == [(last.rows, last.columns)]


def test_what_fails_half_way_is_refused_with_the_matrix_and_another_plan_is_set_whole(tiny):
    bad = []
    net = Fed(tiny, cut(blocks.matrices(tiny), CHUNK),
              lambda b, n: moments(b, n) * float("nan" if (b, n) in bad else 1), lambda b, n, w: None)  # fmt: skip
    net.set([2.0] * len(net.body))
    before = {name: layer.weight.clone() for name, layer in net.layers.items()}
    bad.append((1, "mlp.up_proj"))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj: the input second moments hold NaN or Inf"):
        net.set([3.0] * len(net.body))
    bad.clear()
    net.set([2.0] * len(net.body))
    assert all(torch.equal(layer.weight, before[name]) for name, layer in net.layers.items())


def test_a_plan_of_another_length_is_refused(tiny):
    with pytest.raises(ValueError, match="a plan of 1 widths for"):
        fed(tiny).set([2.0])
