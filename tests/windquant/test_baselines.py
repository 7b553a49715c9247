import pytest
import torch

from tests.conftest import MemoryScratch, walk_of
from windquant.baselines import awq, gptq, hqq
from windquant.baselines.affine import AffineMatrix, code_bytes, grouped, min_max, round_to_nearest
from windquant.baselines.methods import METHODS, Peer, stored_of
from windquant.blocks import matrices
from windquant.errors import InputError
from windquant.scales import quadratic

WINDOWS = torch.randint(300, (8, 24), generator=torch.Generator().manual_seed(0))
BITS = (2, 3, 4)


def weights(rows=48, columns=88, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def moments(columns=88, seed=1):
    x = torch.randn(400, columns, generator=torch.Generator().manual_seed(seed))
    x *= torch.linspace(0.1, 3, columns)
    x[:, 1:] += 0.5 * x[:, :-1]
    return x.T @ x / len(x), x.abs().mean(0)


def error(w, q, H):
    return float(quadratic((w - q.dequantize())[None], H[None]).sum())


def run(walk, name, bits, scratch=None, report=lambda done, total: None):
    peer = Peer(walk, METHODS[name], bits, 32, 0, scratch or MemoryScratch(), name)
    return {n: s for block in peer.method.blocks(peer, WINDOWS, report) for n, s in block.items()}


@pytest.mark.parametrize("bits", BITS)
def test_min_max_reaches_the_ends_and_rounds_by_half_a_step(bits):
    w = weights()
    scale, _ = min_max(w, bits, 32)
    off = (w - round_to_nearest(w, bits, 32).dequantize()).abs()
    assert bool((off <= scale.float().repeat_interleave(32, 1)[:, :88] * 0.501).all())


def test_zero_and_constant_groups_are_kept_as_they_are():
    w = weights()
    w[3], w[5, :32], w[6, :32] = 0, 0.25, -0.25
    q = round_to_nearest(w, 2, 32).dequantize()
    assert torch.equal(q[3], w[3])
    torch.testing.assert_close(q[5:7, :32], w[5:7, :32], rtol=1e-3, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_what_no_scale_can_hold_is_refused(bad):
    w = weights()
    w[2, 3] = bad
    with pytest.raises(InputError, match="a weight is NaN, infinite or too large for a float16 scale"):
        round_to_nearest(w, 2, 32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("make", [round_to_nearest, hqq.half_quadratic], ids=["integer zeros", "float16 zeros"])
def test_stored_parts_give_the_weights_back_bit_for_bit_and_take_the_bytes_they_say(make, bits):
    made = make(weights(), bits, 32)
    made = AffineMatrix(bits, 32, made.codes, made.scale, made.zero, torch.rand(88).half() + 0.5)
    parts = made.tensors()
    assert torch.equal(AffineMatrix.of(48, 88, bits, 32, parts).dequantize(), made.dequantize())
    zeros = code_bytes(48 * 3, bits) if make is round_to_nearest else 2 * 48 * 3
    assert sum(t.nbytes for t in parts.values()) == 48 * 88 * bits // 8 + 2 * 48 * 3 + zeros + 2 * 88


def test_parts_of_another_matrix_are_refused():
    parts = round_to_nearest(weights(), 2, 32).tensors()
    with pytest.raises(InputError, match="stored parts do not fit a 48 x 96 matrix at 2 bits, 32 columns a group"):
        AffineMatrix.of(48, 96, 2, 32, parts)


@pytest.mark.parametrize("bits", BITS)
def test_gptq_with_the_identity_for_moments_is_rounding_to_nearest(bits):
    w = weights()
    assert torch.equal(gptq.round_with_feedback(w, torch.eye(88), bits, 32).codes, round_to_nearest(w, bits, 32).codes)


@pytest.mark.parametrize("bits", BITS)
def test_gptq_errs_less_than_rounding_to_nearest(bits):
    H, _ = moments()
    for seed in range(4):
        w = weights(seed=seed)
        assert error(w, gptq.round_with_feedback(w, H, bits, 32), H) < 0.8 * error(w, round_to_nearest(w, bits, 32), H)


def test_gptq_passes_errors_on_beyond_the_columns_it_takes_together(monkeypatch):
    H, _ = moments()
    whole = gptq.round_with_feedback(weights(), H, 3, 32)
    monkeypatch.setattr(gptq, "TOGETHER", 16)
    assert (gptq.round_with_feedback(weights(), H, 3, 32).codes != whole.codes).float().mean() < 0.01


def test_gptq_without_a_factor_is_rounding_to_nearest():
    w = weights()
    assert torch.equal(gptq.round_with_feedback(w, torch.zeros(88, 88), 3, 32).codes, round_to_nearest(w, 3, 32).codes)


@pytest.mark.parametrize("bits", BITS)
def test_hqq_errs_less_than_rounding_to_nearest_in_its_own_norm(bits):
    w = weights()
    lp = [float(hqq.norm(grouped(w - q.dequantize(), 32)).sum())
          for q in (hqq.half_quadratic(w, bits, 32), round_to_nearest(w, bits, 32))]  # fmt: skip
    assert lp[0] < lp[1]


def test_hqq_shrinks_as_the_minimum_over_a_fine_grid_does():
    """Where the closed form holds: errors well above its threshold."""
    e, x = torch.tensor([0.9, -0.9]), torch.linspace(-1, 1, 20001)
    least = x[(x.abs()[:, None].pow(hqq.P) / hqq.P + 10 / 2 * (x[:, None] - e).square()).argmin(0)]
    torch.testing.assert_close(hqq.shrink(e, 10.0), least, atol=0.01, rtol=0)


@pytest.mark.parametrize("bits", BITS)
def test_awqs_search_is_never_worse_than_no_scaling_and_better_where_inputs_differ(bits):
    H, a = moments()
    ws = [weights(), weights(24, seed=2)]
    none = torch.ones(88)
    found = awq.search(ws, H, a, bits, 32)
    errors = [sum(awq.output_error(w, H, s, bits, 32) for w in ws) for s in (found, none)]
    assert errors[0] < errors[1]
    assert torch.equal(awq.search(ws, torch.eye(88), torch.ones(88), bits, 32), none)


def places(tiny, walk):
    """Where the scales of the first block's inputs go."""
    found = {}

    def treat(view, bits, group):
        fold, layers = awq.Fold(view), awq.linears(view.block)
        for names in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
            fed = [m for n, m in layers.items() if n.endswith(names)]
            place = fold.place(fed)
            found[names[0]] = place and fold.names[place]
        yield from METHODS["awq"].treat(view, bits, group)

    from dataclasses import replace

    peer = Peer(walk, replace(METHODS["awq"], treat=treat), 3, 32, 0, MemoryScratch(), "awq")
    next(peer.run(WINDOWS, lambda done, total: None))
    return found


def test_awqs_scales_go_where_the_model_stays_the_same(tiny, walk):
    """Half as many keys as queries here, so what o_proj is fed with is no matrix's rows."""
    assert places(tiny, walk) == {"q_proj": "input_layernorm", "o_proj": None, "gate_proj": "post_attention_layernorm",
                                  "down_proj": "mlp.up_proj"}  # fmt: skip


@pytest.mark.parametrize("architecture_name", ["gemma3_text", "phi3", "qwen3_moe"])
def test_awq_works_without_knowing_the_architecture(architecture_name):
    from tests.conftest import architecture

    model = architecture(architecture_name)
    assert {m.name for m in matrices(walk_of(model).model)} <= run(walk_of(model), "awq", 3).keys()


@pytest.mark.parametrize("name", METHODS)
def test_what_is_stored_of_a_model_reads_back_bit_for_bit(walk, name):
    made = run(walk, name, 3)
    tensors = {f"{n}.{part}": t for n, s in made.items() for part, t in s.tensors().items()}
    for i in range(2):
        own = {k: t for k, t in tensors.items() if k.startswith(f"model.layers.{i}.")}
        for path, stored in stored_of(walk, i, own, 3, 32).items():
            assert torch.equal(stored.dequantize(), made[path].dequantize())


def test_a_calibrated_method_goes_on_where_it_was_killed(walk):
    class Killed(Exception):
        pass

    def kill(done, total):
        raise Killed

    scratch = MemoryScratch()
    with pytest.raises(Killed):
        run(walk, "gptq", 2, scratch, kill)
    resumed, whole = run(walk, "gptq", 2, scratch), run(walk, "gptq", 2)
    assert all(torch.equal(resumed[n].dequantize(), whole[n].dequantize()) for n in whole)


def test_a_missing_matrix_is_named(walk):
    with pytest.raises(InputError, match="self_attn.q_proj is missing among what is stored of block 0"):
        stored_of(walk, 0, {}, 2, 32)
