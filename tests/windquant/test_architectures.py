"""Every architecture goes the whole way and comes back through transformers, none by a file of its own."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks import packed as packed_models
from tests.conftest import ARCHITECTURES, MemoryScratch, architecture, taken_apart, walk_of
from windquant import blocks, checkpoint
from windquant.calibrate import calibrate
from windquant.quantize import quantize_matrix
from windquant.sensitivity import distortions

CHUNK, WIDTHS = 32, (2, 3, 4, 1.58)
IDS = torch.arange(80).view(2, 40)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_loaded_checkpoint_gives_the_logits_of_the_quantized_model(name, tmp_path):
    model = taken_apart(architecture(name))
    walk = walk_of(model)
    plan = {
        m.name: [WIDTHS[(i + j) % 4] for j in range(-(-m.columns // CHUNK))] for i, m in enumerate(blocks.matrices(model))
    }
    entries = {m.name: checkpoint.entry(m, plan[m.name]) for m in blocks.matrices(model)}
    writer = checkpoint.Writer(tmp_path / "q", checkpoint.Quantization(CHUNK, entries, {}))
    statistics = dict(calibrate(walk, IDS, torch.Generator().manual_seed(0), MemoryScratch(), lambda done, total: None))
    for m in blocks.matrices(model):
        linear, path = model.get_submodule(m.name), m.name.removeprefix(f"{walk.prefix}.{m.block}.")
        H = statistics[m.block][f"H.{int(statistics[m.block][f'source.{path}'])}"]
        table = distortions(linear.weight, H, statistics[m.block][f"g.{path}"], CHUNK)
        assert table[:, -1].sum() < table[:, 0].sum()  # 16 bits against 1
        packed, dense = quantize_matrix(linear.weight, H, plan[m.name], CHUNK)
        writer.add_matrix(m.name, packed)
        linear.weight.copy_(dense)
    for other, p in checkpoint.others(model).items():
        writer.add(other, checkpoint.store_other(other, p))
        p.copy_(checkpoint.store_other(other, p).float())
    writer.close(model.config.to_dict())
    loaded = packed_models.load(tmp_path / "q", torch.device("cpu"))
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    loaded.save_pretrained(tmp_path / "again")
    again = packed_models.load(tmp_path / "again", torch.device("cpu"))
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert again.generate(IDS[:, :5], max_new_tokens=3, do_sample=False).shape == (2, 8)
    export(tmp_path / "q", model)


def export(folder, model):
    """As transformers alone loads it: its own modules, its own names."""
    packed_models.export_dense(folder, folder / "bf16")
    plain = AutoModelForCausalLM.from_pretrained(folder / "bf16", dtype=torch.bfloat16)
    assert torch.equal(taken_apart(plain).bfloat16()(IDS).logits, copy.deepcopy(model).bfloat16()(IDS).logits)
