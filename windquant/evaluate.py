"""Perplexity over windows, and the divergence from the reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windquant.errors import InputError

LogProbabilities = Callable[[int], Tensor]
"""i -> those of window i, as `log_probabilities` gives them."""
ROWS = 32
"""Tokens whose divergence is summed at once: those of a whole window take longer to allocate than to compute."""


@dataclass(frozen=True)
class Scores:
    """nll: mean negative log-likelihood a token, nats. kl: mean KL(reference || model) a token, nats."""

    nll: float
    kl: float | None
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll) if self.nll < 700 else float("inf")


@torch.inference_mode()
def score(
    model: nn.Module | LogProbabilities,
    windows: Tensor,
    stride: int,
    expected: LogProbabilities | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Scores:
    """Score token windows (n, T) cut `stride` apart.

    No token is scored twice: all of the first window but its first token, and of later ones the last `stride` tokens,
    which the windows before have not covered (one fewer when windows do not overlap: a first token has no context).
    model: or what it says, where that is known. expected: what the reference says, from which the model diverges.
    Raises InputError when a logit is NaN.
    """
    nll = kl = 0.0
    tokens = 0
    for i, ids in enumerate(windows):
        keep = slice(0 if i == 0 else len(ids) - 1 - min(stride, len(ids) - 1), None)
        logp = (log_probabilities(model, ids) if isinstance(model, nn.Module) else model(i))[keep]
        nll -= float(logp.gather(-1, ids[1:][keep, None].to(logp.device)).double().sum())
        if expected is not None:
            ref = expected(i).to(logp.device)[keep]
            for p, q in zip(ref.split(ROWS), logp.split(ROWS), strict=True):
                kl += float((p.exp() * (p - q)).sum(-1).double().sum())
        tokens += len(logp)
        report(i + 1, len(windows))
    if math.isnan(nll):
        raise InputError("the model's logits hold NaN on the test text")
    return Scores(nll / tokens, kl / tokens if expected is not None else None, tokens)


@torch.inference_mode()
def log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    """Of every next token in a window (T,): (T - 1, vocabulary), float32."""
    ids = ids.to(next(model.parameters()).device)
    return model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
