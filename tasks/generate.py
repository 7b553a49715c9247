"""Text that a model makes up, to train on where there is none: after LLM-QAT (arXiv 2305.17888, section 3.1).

Every window begins with a token drawn from the vocabulary; the next three are the likeliest ones, all others are sampled
from the model's distribution as it is: nothing of its generation config applies.
"""

from typing import Any

import torch
from torch import Tensor

from windquant.calibrate import Report, Scratch

LIKELIEST, TOGETHER = 3, 32


@torch.inference_mode()
def windows(model: Any, n: int, tokens: int, seed: int, kept: Scratch, report: Report) -> Tensor:
    """Token ids (n, tokens), the same for the same seed; batches of TOGETHER windows are kept."""
    parts = []
    for i, start in enumerate(range(0, n, TOGETHER)):
        count = min(TOGETHER, n - start)
        name = f"generated-{seed}-{i}-{count}-{tokens}-{str(model.dtype).removeprefix('torch.')}"
        if not kept.has(name):
            generator = torch.Generator().manual_seed(seed + 1000 * i)
            kept.put(name, {"ids": _batch(model, count, tokens, generator)})
        parts.append(kept.get(name)["ids"])
        report(start + count, n)
    return torch.cat(parts)


def _batch(model: Any, n: int, tokens: int, generator: torch.Generator) -> Tensor:
    ids = [torch.randint(model.config.vocab_size, (n, 1), generator=generator)]
    past = None
    for i in range(1, tokens):
        out = model(input_ids=ids[-1].to(model.device), past_key_values=past, use_cache=True)
        past, logits = out.past_key_values, out.logits[:, -1].float().cpu()
        likeliest = logits.argmax(-1, keepdim=True)
        ids.append(likeliest if i <= LIKELIEST else logits.softmax(-1).multinomial(1, generator=generator))
    return torch.cat(ids, 1)
