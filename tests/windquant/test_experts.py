import copy

import pytest
import torch
from safetensors import safe_open

from tasks.models import skeleton
from tests.conftest import architecture, taken_apart
from windquant import blocks, checkpoint, experts

IDS = torch.arange(60).view(2, 30)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])  # gpt_oss: transposed, interleaved, biases, own gate
def test_taken_apart_the_experts_compute_the_same(name):
    """The same products, added up in another order: float32 rounding of logits of order 1."""
    model = architecture(name)
    for p in model.parameters():
        p.data.normal_(0, 0.2)  # biases too
    torch.testing.assert_close(taken_apart(model)(IDS).logits, model(IDS).logits, atol=2e-5, rtol=2e-5)


def test_an_index_past_the_last_expert_means_none():
    layer = taken_apart(architecture("mixtral")).model.layers[0].mlp.experts
    x, index, weight = torch.randn(3, 64), torch.tensor([[0, 4], [4, 4], [4, 1]]), torch.ones(3, 2)
    expected = torch.stack([layer.run(layer[0], x[0]), torch.zeros(64), layer.run(layer[1], x[2])])
    torch.testing.assert_close(layer(x, index, weight), expected)


def test_the_names_are_those_on_disk(tmp_path):
    """So that a folder from a hub is read as it is."""
    model = architecture("qwen3_moe")
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        assert set(f.keys()) == {name for name, _ in skeleton(model.config).named_parameters()}


def test_other_models_stay_as_they_are(tiny):
    before = {name: type(m) for name, m in tiny.named_modules()}
    experts.unfuse_(tiny)
    assert {name: type(m) for name, m in tiny.named_modules()} == before


def test_experts_in_pieces_can_be_copied_and_share_nothing():
    model = taken_apart(architecture("mixtral"))
    other = copy.deepcopy(model)
    other.model.layers[0].mlp.experts[0].up_proj.weight.data.zero_()
    assert not torch.equal(other(IDS).logits, model(IDS).logits)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_routers_are_not_quantized_but_stored(name):
    model = skeleton(architecture(name).config)
    names = {f"model.layers.{i}.{n}" for i in (0, 1) for n in experts.routers(model.model.layers[i])}
    assert len(names) == 2 and all(n.endswith(("gate.weight", "router.weight")) for n in names)
    assert names <= checkpoint.others(model).keys()
    assert not names & {f"{m.name}.weight" for m in blocks.matrices(model)}
    assert blocks.outside_linears(model) is None


def test_a_router_that_is_a_linear_layer_is_no_matrix():
    model = taken_apart(architecture("mixtral"))
    block = model.model.layers[0]
    block.mlp.gate = torch.nn.Linear(64, 4, bias=False)
    assert experts.routers(block) == {"mlp.gate.weight"} and "mlp.gate" not in blocks.linears(block)


def test_a_shared_expert_with_as_many_rows_as_there_are_experts_is_no_router():
    block = taken_apart(architecture("mixtral")).model.layers[0]
    block.mlp.shared_expert = torch.nn.ModuleDict({"gate_proj": torch.nn.Linear(64, 4, bias=False)})
    assert experts.routers(block) == {"mlp.gate.weight"} and "mlp.shared_expert.gate_proj" in blocks.linears(block)


def test_buffers_that_correct_a_router_are_stored(tiny):
    tiny.model.layers[0].mlp.register_buffer("e_score_correction_bias", torch.ones(8))
    tiny.model.layers[0].mlp.register_buffer("scratch", torch.ones(8), persistent=False)
    names = checkpoint.others(tiny).keys()
    assert "model.layers.0.mlp.e_score_correction_bias" in names and "model.layers.0.mlp.scratch" not in names


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_fused_again_the_experts_are_as_they_were(name):
    model = architecture(name)
    for p in model.parameters():
        p.data.normal_(0, 0.2)
    again = taken_apart(model)
    experts.fuse_(again)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(t, after[n]) for n, t in before.items())
    assert torch.equal(again(IDS).logits, model(IDS).logits)
