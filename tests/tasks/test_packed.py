import subprocess
import sys

import pytest
import torch

from tasks import card, packed, plans, store
from tasks.errors import UserError
from tests.conftest import tiny_tokenizer
from tests.windquant.test_checkpoint import CHUNK, edit, save
from windquant import blocks, checkpoint
from windquant.evaluate import Scores
from windquant.grids import BY_SYMBOL
from windquant.units import cut

CPU = torch.device("cpu")
IDS = torch.arange(30)[None]


@pytest.fixture
def folder(tiny, tmp_path):
    folder = save(tiny, tmp_path / "lagrangian")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_what_is_not_whole_ends_in_a_sentence(folder):
    edit(folder, lambda q: q.update(version=99))
    with pytest.raises(UserError, match="format version 99, this release reads 2; update windquant"):
        packed.load(folder, CPU)


def test_a_truncated_file_ends_in_a_sentence(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged or cut short"):
        packed.load(folder, CPU)


@torch.inference_mode()
def test_the_export_is_a_plain_model(folder):
    """Loaded by a process that never saw windquant, it is the packed model, its weights rounded to bfloat16."""
    packed.export_dense(folder, folder / "bf16")
    code = f"""
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained({str(folder / "bf16")!r}, output_loading_info=True)
assert not any(info.values()), info
AutoTokenizer.from_pretrained({str(folder / "bf16")!r})
assert model.dtype == torch.bfloat16 and not any(m.startswith("windquant") for m in sys.modules)
torch.save(model(torch.arange(30)[None]).logits, {str(folder / "logits")!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(folder / "logits"), packed.load(folder, CPU, torch.bfloat16)(IDS).logits)
    assert checkpoint.count(folder).body  # what lies beside the packed files is not counted with them


def test_the_card_says_what_the_checkpoint_is(folder, tiny, monkeypatch):
    monkeypatch.chdir(folder.parent)
    store.save_json(store.path("prepare") / "manifest.json", {"model": "hf:org/tiny", "model_hash": "abc", "text": "path:t.txt",
                                                              "text_hash": "def"})  # fmt: skip
    plan = checkpoint.read_quantization(folder).plan
    bits = [BY_SYMBOL[s].bits for _, _, symbols in plan.values() for s in symbols]
    header = {"allocator": "lagrangian", "target_bits": 5.5, "chunk_size": CHUNK, "seed": 0, "embedding_bits": None,
              "salient": "none", "salient_share": 0.03}  # fmt: skip
    count = checkpoint.count(folder)
    plan = plans.Plan(cut(blocks.matrices(tiny), CHUNK), bits, header, [0] * len(bits))
    card.write(folder, plan, count, "feedback", Scores(2.0, None, 77))
    text = (folder / "README.md").read_text()
    for part in ('base_model: "org/tiny"', "path:t.txt", "import windquant", "| treatment | feedback |", f"{count.effective_bits:.4f} of the quantized",
                 f"| all | {count.model:,} |", "7.39 a token, on the first 77", "artifacts/runs/quantize.json"):  # fmt: skip
        assert part in text, part
