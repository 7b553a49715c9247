"""Experts see some tokens each, perhaps none: what calibrate says of them."""

import pytest
import torch

from tests.conftest import MemoryScratch, architecture, taken_apart, walk_of
from windquant.calibrate import calibrate

IDS = torch.arange(1, 121).view(3, 40)  # not 0, the padding: a zero embedding has gradients without bound
IDLE, LAYER = 3, "mlp.experts"


@pytest.fixture(scope="module")
def model():
    """Router rows in opposite pairs: two of them are above zero for every token, so that the zero row never wins."""
    made = architecture("qwen3_moe")
    for block in made.model.layers:
        gate = block.mlp.gate.weight
        gate.normal_(0, 0.1)
        gate[1::2] = -gate[::2]
        gate[2 : IDLE + 1] = 0
    return taken_apart(made)


@pytest.fixture(scope="module")
def found(model):
    generator = torch.Generator().manual_seed(0)
    return dict(calibrate(walk_of(model), IDS, generator, MemoryScratch(), lambda done, total: None))[1]


@pytest.fixture(scope="module")
def seen(model):
    """expert -> its inputs in block 1, over all windows."""
    out = {}
    layer = model.model.layers[1].mlp.experts
    hooks = [
        m.gate_proj.register_forward_pre_hook(lambda _, a, i=i: out.setdefault(i, []).append(a[0]))
        for i, m in enumerate(layer)
    ]
    model(IDS)
    for h in hooks:
        h.remove()
    return {i: torch.cat(x) for i, x in out.items()}


def moment(found, name):
    return found[f"H.{int(found[f'source.{LAYER}.{name}'])}"]


def second(x):
    return x.T @ x / len(x)


def test_tokens_are_counted(found, seen):
    counts = {i: int(found[f"tokens.{LAYER}.{i}.{p}"]) for p in ("gate_proj", "up_proj", "down_proj") for i in range(8)}
    assert counts == {i: len(seen.get(i, ())) for i in range(8)} and counts[IDLE] == 0
    assert sum(counts.values()) == 2 * IDS.numel()


def test_moments_are_those_of_the_experts_own_tokens_and_of_a_quarter_columns_pooled(found, seen):
    pooled = second(torch.cat(list(seen.values())))
    for i, x in seen.items():
        expected = (len(x) * second(x) + 16 * pooled) / (len(x) + 16)
        torch.testing.assert_close(moment(found, f"{i}.gate_proj"), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(moment(found, f"{i}.up_proj"), expected, rtol=1e-4, atol=1e-5)


def test_inner_moments_are_those_of_the_experts_own_tokens_alone(model, found, seen):
    for i, x in seen.items():
        expert = model.model.layers[1].mlp.experts[i]
        inner = torch.nn.functional.silu(expert.gate_proj(x)) * expert.up_proj(x)
        torch.testing.assert_close(moment(found, f"{i}.down_proj"), second(inner), rtol=1e-4, atol=1e-8)


def test_an_expert_without_tokens_has_the_pooled_moment_and_a_round_one_inside(found, seen):
    pooled = second(torch.cat(list(seen.values())))
    torch.testing.assert_close(moment(found, f"{IDLE}.gate_proj"), pooled, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moment(found, f"{IDLE}.up_proj"), pooled, rtol=1e-4, atol=1e-5)
    level = sum(len(x) * moment(found, f"{i}.down_proj").diagonal().mean() for i, x in seen.items()) / (2 * IDS.numel())
    torch.testing.assert_close(moment(found, f"{IDLE}.down_proj"), level * torch.eye(48), rtol=1e-4, atol=0.0)


def test_an_expert_without_tokens_weighs_one_token_of_the_others(found, seen):
    for kind in ("gate_proj", "down_proj"):
        total = sum(found[f"g.{LAYER}.{i}.{kind}"].mean() for i in seen)  # of all tokens that the others saw
        expected = (total / (2 * IDS.numel())).expand_as(found[f"g.{LAYER}.{IDLE}.{kind}"])
        torch.testing.assert_close(found[f"g.{LAYER}.{IDLE}.{kind}"], expected, rtol=1e-4, atol=0.0)


def test_the_predicted_nats_are_those_of_a_token_of_the_text(model, found):
    """1/2 sum g e^T H e against the measured KL divergence of small random changes of one expert at a time. They are
    one but for the factoring of the curvature; per token of the expert they would differ by a factor of 3 to 6."""
    exact = taken_apart(model).double()
    before = exact(IDS).logits.log_softmax(-1)
    generator = torch.Generator().manual_seed(0)
    predicted = measured = 0.0
    for i in (i for i in range(8) if found[f"tokens.{LAYER}.{i}.down_proj"] > 10):
        weight = exact.model.layers[1].mlp.experts[i].down_proj.weight
        g, H = found[f"g.{LAYER}.{i}.down_proj"].double(), moment(found, f"{i}.down_proj").double()
        for _ in range(8):
            e = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 1e-3
            predicted += float(0.5 * g @ (e @ H * e).sum(1))
            weight += e
            after = exact(IDS).logits.log_softmax(-1)
            weight -= e
            measured += float((before.exp() * (before - after)).sum(-1).mean())
    assert predicted == pytest.approx(measured, rel=0.15)
