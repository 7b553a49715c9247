"""Text that a model makes up, to train on where there is none: after LLM-QAT (arXiv 2305.17888, section 3.1).

Every window begins with a token drawn from the vocabulary; the next three are the likeliest ones, all others are sampled.
"""

from typing import Any

import torch
from torch import Tensor

from tasks.store import Scratch
from windquant.calibrate import Report

LIKELIEST, TOGETHER = 3, 32


@torch.inference_mode()
def windows(model: Any, n: int, tokens: int, seed: int, scratch: Scratch, report: Report) -> Tensor:
    """Token ids (n, tokens), the same for the same seed; batches of TOGETHER windows are kept in scratch. The random numbers
    of the process stay as they were."""
    parts = []
    for i, start in enumerate(range(0, n, TOGETHER)):
        if not scratch.has(f"generated-{i}"):
            scratch.put(f"generated-{i}", {"ids": _batch(model, min(TOGETHER, n - start), tokens, seed + 1000 * i)})
        parts.append(scratch.get(f"generated-{i}")["ids"])
        report(min(start + TOGETHER, n), n)
    return torch.cat(parts)


def _batch(model: Any, n: int, tokens: int, seed: int) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first = torch.randint(model.config.vocab_size, (n, 1)).to(model.device)
        begun = _go_on(model, first, min(LIKELIEST, tokens - 1), do_sample=False)
        return _go_on(model, begun, tokens - begun.shape[1], do_sample=True, temperature=1.0, top_k=0, top_p=1.0).cpu()


def _go_on(model: Any, ids: Tensor, tokens: int, **how: Any) -> Tensor:
    """Exactly so many more: an end of text is followed by another."""
    if not tokens:
        return ids
    end = model.generation_config.eos_token_id
    end = end[0] if isinstance(end, list) else end
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                          pad_token_id=end, **how)  # fmt: skip
