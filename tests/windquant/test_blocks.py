import pytest
import torch
from torch import nn

from tests.conftest import ARCHITECTURES, architecture, walk_of
from windquant import blocks

IDS = torch.arange(20).view(2, 10)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_streaming_block_by_block_gives_the_models_logits(name):
    model = architecture(name)
    walk = walk_of(model)
    hidden = walk.embed(IDS)
    for i in range(len(walk)):
        with walk.block(i) as block:
            hidden = torch.cat([walk.run(i, block, h[None]) for h in hidden])
    with walk.head() as head:
        logits = torch.cat([head(h[None]) for h in hidden])
    torch.testing.assert_close(logits, model(IDS).logits, atol=1e-5, rtol=1e-5)


def test_nothing_stays_in_memory_after_use(walk):
    walk.embed(IDS)
    with walk.block(0) as block:
        assert not any(p.is_meta for p in block.parameters())
    assert all(p.is_meta for p in walk.model.parameters())


def test_the_body_is_the_linear_layers_of_the_blocks(tiny):
    found = blocks.matrices(tiny)
    assert len(found) == 2 * 7 and {m.block for m in found} == {0, 1}
    q = found[0]
    assert (q.name, q.kind, q.rows, q.columns) == ("model.layers.0.self_attn.q_proj", "q_proj", 64, 64)


def test_experts_are_never_taken_for_blocks():
    """There may be more of them in a block than there are blocks."""
    prefix, found = blocks.decoder_blocks(walk_of(architecture("qwen3_moe")).model)
    assert prefix == "model.layers" and len(found) == 2


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="Linear has no list of decoder blocks"):
        blocks.decoder_blocks(nn.Linear(2, 2))


def test_weights_of_another_model_are_refused(walk):
    walk.source = lambda wanted: {"model.layers.0.self_attn.q_proj.weight": torch.zeros(64, 64)}
    with pytest.raises(ValueError, match=r"do not fit its config: block 0 lacks self_attn\.k_proj\.weight"), walk.block(0):
        pass


def test_buffers_that_old_checkpoints_carry_do_no_harm(walk):
    original = walk.source
    stray = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    walk.source = lambda wanted: original(wanted) | {n: t for n, t in stray.items() if wanted(n)}
    with walk.block(0) as block:
        assert not any(p.is_meta for p in block.parameters())


def test_weights_outside_linear_layers_are_found(tiny):
    assert blocks.outside_linears(tiny) is None
    tiny.model.layers[1].mlp.experts = nn.ParameterList([nn.Parameter(torch.zeros(2, 3, 4))])
    assert blocks.outside_linears(tiny) == "model.layers.1.mlp.experts.0"
