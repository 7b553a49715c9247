"""A tiny LLaMA (2 blocks, hidden 64) and a tokenizer made in-process; nothing is fetched."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from windquant.blocks import Walk, WeightSource
from windquant.experts import unfuse_

SENTENCE = "the a model of weights reads some text and writes it again in two bits while nobody looks closely at rows"
WORDS = SENTENCE.split()


def tiny_config(**changes):
    from transformers import LlamaConfig

    return LlamaConfig(**{
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    } | changes)  # fmt: skip


ARCHITECTURES = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": 8},
    "phi3": {},
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def architecture(name: str, **changes) -> nn.Module:
    """A tiny random model of another architecture, as transformers makes it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    own = tiny_config().to_diff_dict()
    own = {k: v for k, v in own.items() if k not in ("model_type", "transformers_version", "head_dim")}
    config = CONFIG_MAPPING[name](**own | ARCHITECTURES[name] | changes)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def taken_apart(model: nn.Module) -> nn.Module:
    """A copy whose experts are linear layers."""
    copied = copy.deepcopy(model)
    unfuse_(copied)
    return copied


@pytest.fixture
def tiny() -> nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config()).eval().requires_grad_(False)


def source_of(model: nn.Module) -> WeightSource:
    """The model's own weights, as a checkpoint would hold them: tied ones once, experts one by one."""
    tensors = {name: p.detach().clone() for name, p in taken_apart(model).named_parameters()}
    return lambda wanted: {name: t for name, t in tensors.items() if wanted(name)}


def walk_of(model: nn.Module) -> Walk:
    from tasks.models import skeleton

    return Walk(skeleton(model.config), source_of(model), torch.device("cpu"))


@pytest.fixture
def walk(tiny: nn.Module) -> Walk:
    return walk_of(tiny)


def tiny_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, bos_token=end, pad_token=end)


def article(seed: int, sentences: int = 40) -> str:
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(sentences):
        picks = torch.randint(len(WORDS), (12,), generator=generator).tolist()
        out.append(" ".join(WORDS[i] for i in picks).capitalize() + ".")
    return " ".join(out)


@pytest.fixture
def tiny_folder(tmp_path: Path, tiny: nn.Module) -> Path:
    """Model and tokenizer as transformers saves them."""
    folder = tmp_path / "model"
    tiny.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


class MemoryScratch:
    """Resume state in a dict."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, torch.Tensor]] = {}

    def has(self, name: str) -> bool:
        return name in self.kept

    def get(self, name: str) -> dict[str, torch.Tensor]:
        return self.kept[name]

    def put(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        self.kept[name] = {k: v.clone() for k, v in tensors.items()}
