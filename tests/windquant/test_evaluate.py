import pytest
import torch

from windquant.evaluate import log_probabilities, score

TEXT = torch.arange(100) % 97


def test_nll_is_the_models_own_loss(tiny):
    windows = TEXT[:80].view(4, 20)
    expected = sum(tiny(input_ids=w[None], labels=w[None]).loss.item() for w in windows) / 4
    assert score(tiny, windows, 20).nll == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stride", [20, 10, 7])
def test_overlapping_windows_score_every_token_once(tiny, stride):
    """First window: all but its first token; later ones: `stride` tokens, or all they can score without overlap."""
    windows = TEXT.unfold(0, 20, stride)
    each = min(stride, 19)
    assert score(tiny, windows, stride).tokens == 19 + (len(windows) - 1) * each


def test_more_context_is_what_overlap_gives(tiny):
    """The second window's last 10 tokens are scored given the 10 before."""
    windows = TEXT.unfold(0, 20, 10)[:2]
    logp = tiny(windows[1][None]).logits[0, :-1].log_softmax(-1)
    second = -logp.gather(-1, windows[1][1:, None])[-10:].sum()
    first = score(tiny, windows[:1], 20)
    assert score(tiny, windows, 10).nll * 29 == pytest.approx(first.nll * 19 + second.item(), rel=1e-5)


def test_a_model_does_not_diverge_from_itself(tiny):
    windows = TEXT[:40].view(2, 20)
    assert score(tiny, windows, 20, lambda i: log_probabilities(tiny, windows[i])).kl == pytest.approx(0, abs=1e-6)


def test_a_model_whose_log_probabilities_are_known_need_not_be_asked(tiny):
    windows = TEXT.unfold(0, 20, 7)
    known = [log_probabilities(tiny, ids) for ids in windows]
    assert score(known.__getitem__, windows, 7) == score(tiny, windows, 7)


def test_nan_logits_are_refused(tiny):
    tiny.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="logits hold NaN"):
        score(tiny, TEXT[:40].view(2, 20), 20)
