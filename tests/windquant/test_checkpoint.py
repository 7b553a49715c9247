import json

import pytest
import torch

from tasks.models import skeleton
from windquant import blocks, checkpoint
from windquant.quantize import quantize_matrix
from windquant.units import cut, weights_in

CHUNK = 32


@pytest.fixture
def saved(tiny, tmp_path):
    """A checkpoint of the tiny model, and the same weights in memory."""
    writer, folder = checkpoint.Writer(tmp_path / "q"), tmp_path / "q"
    for i, m in enumerate(blocks.matrices(tiny)):
        linear = tiny.get_submodule(m.name)
        widths = [(2, 3, 16, 1.58, 1, 4, 8)[(i + j) % 7] for j in range(-(-m.columns // CHUNK))]
        packed, dense = quantize_matrix(linear.weight, torch.eye(m.columns), widths, CHUNK)
        writer.add_matrix(m.name, packed)
        linear.weight.data.copy_(dense)
    for name, p in checkpoint.others(tiny).items():
        writer.add(name, checkpoint.store_other(name, p))
        p.data.copy_(checkpoint.store_other(name, p).float())
    writer.close(tiny.config.to_dict(), CHUNK)
    return folder, tiny


def load(folder, model):
    return checkpoint.load(folder, skeleton(model.config), torch.device("cpu"))


def test_logits_after_loading_are_equal(saved):
    folder, model = saved
    ids = torch.arange(30)[None]
    loaded = load(folder, model)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_missing_shard_is_refused(saved, monkeypatch, tmp_path):
    _, model = saved
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    folder = tmp_path / "sharded"
    writer = checkpoint.Writer(folder)
    for m in blocks.matrices(model):
        widths = [4] * -(-m.columns // CHUNK)
        writer.add_matrix(
            m.name, quantize_matrix(model.get_submodule(m.name).weight, torch.eye(m.columns), widths, CHUNK)[0]
        )
    for name, p in checkpoint.others(model).items():
        writer.add(name, checkpoint.store_other(name, p))
    writer.close(model.config.to_dict(), CHUNK)
    load(folder, model)  # whole
    next(folder.glob("model-00002-of-*")).unlink()
    with pytest.raises(checkpoint.CheckpointError, match="lacks model-00002-of"):
        load(folder, model)


def test_every_byte_on_disk_is_counted(saved):
    folder, model = saved
    counted = checkpoint.count(folder)
    assert counted.model - counted.plan == (folder / "model.safetensors").stat().st_size
    assert counted.weights == weights_in(cut(blocks.matrices(model), CHUNK))
    assert counted.parameters == sum(p.numel() for p in model.parameters())
    assert counted.embeddings == 2 * 300 * 64 and counted.head == 0


def test_the_header_bound_holds(saved):
    folder, model = saved
    header = checkpoint.count(folder).header
    assert header <= checkpoint.header_bound(model) <= 2 * header


def edit(folder, change):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))


def test_another_version_is_refused(saved):
    edit(saved[0], lambda q: q.update(version=99))
    with pytest.raises(checkpoint.CheckpointError, match="format version 99, this release reads 1"):
        load(*saved)


def test_a_tampered_plan_is_refused(saved):
    def widen(q):
        q["plan"]["model.layers.0.self_attn.q_proj"][2] = "88"

    edit(saved[0], widen)
    with pytest.raises(checkpoint.CheckpointError, match=r"q_proj: packed tensors .* do not fit the plan"):
        load(*saved)


def test_a_plan_that_misses_a_matrix_is_refused(saved):
    edit(saved[0], lambda q: q["plan"].pop("model.layers.1.mlp.up_proj"))
    with pytest.raises(checkpoint.CheckpointError, match="does not fit its own config"):
        load(*saved)


def test_a_truncated_file_is_refused(saved):
    file = saved[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(checkpoint.CheckpointError, match="damaged or cut short"):
        load(*saved)


def test_a_plain_model_is_no_checkpoint_of_ours(tiny, tmp_path):
    tiny.save_pretrained(tmp_path / "plain")
    with pytest.raises(checkpoint.CheckpointError, match="no quantization_config of windquant"):
        checkpoint.count(tmp_path / "plain")
