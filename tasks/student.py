"""What finetune trains: a checkpoint of ours with layers that round in every pass, and the reference beside it."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks import models, packed, store
from tasks.errors import UserError
from tasks.finetune import FinetuneConfig
from windquant import qat
from windquant.engine import compute_fast


class Student(nn.Module):
    """A model with quantized layers, and the reference that it learns from: token ids (n, T) -> its loss, nats a token. Its
    state is what is trained and nothing else. reference: None where nothing is distilled."""

    def __init__(self, model: Any, reference: Any, config: FinetuneConfig) -> None:
        super().__init__()
        self.model, self.distill = model, config.distill
        self._reference = [reference]  # in a list: it is no part of what is trained
        rounded = qat.layers(model).values()
        own = {id(p) for layer in rounded for p in (layer.w, layer.log)}
        for p in model.parameters():
            p.requires_grad_(id(p) in own or config.train == "all" or (config.train == "norms" and p.dim() == 1))
        self._scales = {id(layer.log) for layer in rounded}

    @property
    def reference(self) -> Any:
        return self._reference[0]

    def groups(self, config: FinetuneConfig) -> list[dict[str, Any]]:
        """For the optimizer: weights and tables, and what there is little of and much is known about."""
        trained = [p for p in self.parameters() if p.requires_grad]
        few = {id(p) for p in trained if id(p) in self._scales or p.dim() == 1}
        return [
            {"params": [p for p in trained if id(p) not in few], "lr": config.lr},
            {"params": [p for p in trained if id(p) in few], "lr": config.lr_scales},
        ]

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logp = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        nll = F.nll_loss(logp.flatten(0, 1), input_ids[:, 1:].flatten())
        loss = (1 - self.distill) * nll
        if self.distill:
            with torch.no_grad():
                expected = self.reference(input_ids=input_ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
            loss = loss + self.distill * F.kl_div(logp, expected, reduction="sum", log_target=True) / logp[..., 0].numel()
        return {"loss": loss, "nll": nll.detach()}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        names = {name for name, p in self.named_parameters() if p.requires_grad}
        return {name: t for name, t in super().state_dict(*args, **kwargs).items() if name in names}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        names = {name for name, p in self.named_parameters() if p.requires_grad}
        if names != state_dict.keys():
            raise UserError("a checkpoint of the training is of another plan; delete .state/finetune")
        found = super().load_state_dict(state_dict, strict=False, assign=assign)
        return type(found)([], found.unexpected_keys)  # what is not trained is not missing


def build(source: Path, config: FinetuneConfig, device: torch.device) -> Student:
    """Of a checkpoint folder that quantize wrote: weights start as near to the reference's as the codes allow."""
    reference = models.reference(store.path("prepare") / "model", device)
    model = packed.load(source, device)
    for name, layer, matrix in list(packed.matrices(model)):
        model.set_submodule(name, qat.QuantizedLinear(matrix, layer.bias, reference.get_submodule(name).weight))
    return Student(model, reference.bfloat16() if compute_fast(device) else reference, config)
