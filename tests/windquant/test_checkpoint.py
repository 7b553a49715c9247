import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import windquant  # noqa: F401  registers the format with transformers
from tests.conftest import tiny_config
from windquant import blocks, checkpoint, embeddings
from windquant.quantize import quantize_matrix
from windquant.salient import Protection, protect, total_size
from windquant.units import cut, weights_in

CHUNK = 32
WIDTHS = (2, 3, 16, 1.58, 1, 4, 8)


def save(model, folder, widths=WIDTHS, embedding_bits=None, protection=None):
    """A checkpoint of the model with all widths mixed; the model's own weights become what was stored."""
    writer = checkpoint.Writer(folder)
    for i, m in enumerate(blocks.matrices(model)):
        linear = model.get_submodule(m.name)
        bits = [widths[(i + j) % len(widths)] for j in range(-(-m.columns // CHUNK))]
        salient = protect(linear.weight, torch.ones(m.columns), protection) if protection else None
        packed, dense = quantize_matrix(linear.weight, torch.eye(m.columns), bits, CHUNK, salient)
        writer.add_matrix(m.name, packed)
        linear.weight.data.copy_(dense)
    tables = embeddings.matrices(model) if embedding_bits else []
    for m in tables:
        weight = model.get_submodule(m.name).weight
        packed, dense = embeddings.quantize(weight.data, embedding_bits, CHUNK)
        writer.add_matrix(m.name, packed, embedding=True)
        weight.data.copy_(dense)
    for name, p in checkpoint.others(model, tables).items():
        writer.add(name, checkpoint.store_other(name, p))
        p.data.copy_(checkpoint.store_other(name, p).float())
    writer.close(model.config.to_dict(), CHUNK, protection)
    return folder


@pytest.fixture
def saved(tiny, tmp_path):
    """A checkpoint of the tiny model, and the same weights in memory."""
    return save(tiny, tmp_path / "q"), tiny


def load(folder, model=None):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("shard", [2, 3])
def test_a_missing_shard_is_refused(tiny, monkeypatch, tmp_path, shard):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    folder = save(tiny, tmp_path / "sharded")
    load(folder)  # whole
    next(folder.glob(f"model-0000{shard}-of-*")).unlink()
    with pytest.raises(checkpoint.CheckpointError, match=f"lacks model-0000{shard}-of"):
        checkpoint.files(folder)
    with pytest.raises(checkpoint.CheckpointError, match=f"lacks model-0000{shard}-of"):
        load(folder)


def test_every_byte_on_disk_is_counted(saved):
    folder, model = saved
    counted = checkpoint.count(folder)
    assert counted.model - counted.plan == (folder / "model.safetensors").stat().st_size
    assert counted.weights == weights_in(cut(blocks.matrices(model), CHUNK))
    assert counted.parameters == sum(p.numel() for p in model.parameters())
    assert counted.embeddings == 2 * 300 * 64 and counted.head == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_packed_embeddings_are_counted(tmp_path, tied, bits):
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(tie_word_embeddings=tied))
    predicted = checkpoint.other_bytes(model, cut(embeddings.matrices(model), CHUNK), bits)
    counted = checkpoint.count(save(model, tmp_path / "q", embedding_bits=bits))
    table = 2 * (300 * 32 * bits // 8 + 300 + 4 + 1)
    assert (counted.embeddings, counted.head) == (table, 0 if tied else table)
    assert counted.parameters == sum(p.numel() for p in model.parameters())
    assert counted.model <= counted.body + predicted <= counted.model + counted.header


def test_the_bytes_beside_the_body_are_bounded(saved):
    folder, model = saved
    counted = checkpoint.count(folder)
    assert counted.model <= counted.body + checkpoint.other_bytes(model) <= counted.model + counted.header


@pytest.fixture(params=["weights", "columns"])
def protected(request, tiny, tmp_path):
    """As `saved`, 5 % of every matrix in INT8; and how it is protected."""
    protection = Protection(request.param, 0.05)
    return save(tiny, tmp_path / "q", protection=protection), tiny, protection


def test_salient_bytes_are_those_that_the_shapes_foretell(protected):
    folder, model, protection = protected
    counted, body = checkpoint.count(folder), cut(blocks.matrices(model), CHUNK)
    assert counted.salient == total_size(protection, body)
    assert counted.model - counted.plan == (folder / "model.safetensors").stat().st_size
    beside = checkpoint.other_bytes(model, protection=protection)
    assert counted.model <= counted.body + beside <= counted.model + counted.header


def test_the_papers_bits_count_salient_weights_as_eight(tiny, tmp_path):
    protection = Protection("columns", 0.05)
    counted = checkpoint.count(save(tiny, tmp_path / "q", widths=(2,), protection=protection))
    matrices = blocks.matrices(tiny)
    in_int8 = sum(m.rows * round(0.05 * m.columns) for m in matrices)
    assert counted.effective_bits_paper == pytest.approx(2 + 6 * in_int8 / sum(m.weights for m in matrices))


def test_another_salient_share_is_refused(protected):
    edit(protected[0], lambda q: q.update(salient_share=0.06))
    with pytest.raises(checkpoint.CheckpointError, match=r"salient_\w+ has the shape .* in the checkpoint, its config.json"):
        load(protected[0])


def test_salient_weights_that_config_json_does_not_name_are_refused(protected):
    edit(protected[0], lambda q: q.update(salient="none"))
    with pytest.raises(checkpoint.CheckpointError, match=r"holds the tensor .*\.salient_codes, which the model has not"):
        load(protected[0])


def test_salient_weights_that_are_missing_are_refused(saved):
    edit(saved[0], lambda q: q.update(salient="weights", salient_share=0.05))
    with pytest.raises(checkpoint.CheckpointError, match=r"lacks the tensor .*\.salient_codes"):
        load(saved[0])


@pytest.mark.parametrize("change", [{"salient": "rows"}, {"salient": "weights", "salient_share": 0.5}])
def test_an_unknown_protection_is_refused(saved, change):
    edit(saved[0], lambda q: q.update(change))
    with pytest.raises(checkpoint.CheckpointError, match="salient.* (is unknown|is not between)"):
        load(saved[0])


def rewrite(folder, change):
    """change: tensors -> the tensors to put in their place."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | change(tensors), folder / "model.safetensors", {"format": "pt"})


def test_a_salient_range_of_another_type_is_refused(protected):
    name = "model.layers.0.mlp.up_proj.salient_span"
    rewrite(protected[0], lambda tensors: {name: tensors[name].float()})
    with pytest.raises(checkpoint.CheckpointError, match="up_proj.salient_span is stored as F32, not as F16"):
        load(protected[0])


def test_damaged_positions_are_named(protected):
    name = "model.layers.0.mlp.up_proj.salient_positions"
    rewrite(protected[0], lambda tensors: {name: torch.zeros_like(tensors[name])})
    with pytest.raises(checkpoint.CheckpointError, match="up_proj: the positions of salient weights are damaged"):
        checkpoint.count(protected[0])


def edit(folder, change):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))


def test_another_version_is_refused(saved):
    edit(saved[0], lambda q: q.update(version=99))
    with pytest.raises(checkpoint.CheckpointError, match="format version 99, this release reads 1"):
        load(saved[0])


def test_a_tampered_plan_is_refused(saved):
    def widen(q):
        q["plan"]["model.layers.0.self_attn.q_proj"][2] = "88"

    edit(saved[0], widen)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"q_proj.codes has the shape .* in the checkpoint, its config.json says"
    ):
        load(saved[0])


def test_a_plan_that_misses_a_matrix_is_refused(saved):
    edit(saved[0], lambda q: q["plan"].pop("model.layers.1.mlp.up_proj"))
    with pytest.raises(checkpoint.CheckpointError, match=r"lacks the tensor model.layers.1.mlp.up_proj.weight"):
        load(saved[0])


def test_a_plan_with_an_unknown_letter_is_refused(saved):
    edit(saved[0], lambda q: q["plan"]["model.layers.0.self_attn.q_proj"].__setitem__(2, "2x"))
    with pytest.raises(checkpoint.CheckpointError, match="q_proj: plan '2x' is not 2 of the letters"):
        load(saved[0])


def test_a_plan_that_names_what_the_model_has_not_is_refused(saved):
    edit(saved[0], lambda q: q["plan"].update({"model.layers.7.mlp.up_proj": [96, 64, "22"]}))
    with pytest.raises(checkpoint.CheckpointError, match="the plan names model.layers.7.mlp.up_proj, which the model"):
        load(saved[0])


def test_a_config_of_another_model_is_refused(saved):
    file = saved[0] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 128}))
    with pytest.raises(checkpoint.CheckpointError, match=r"gate_proj is 96 x 64 in the plan and 128 x 64 by config.json"):
        load(saved[0])


def test_a_config_with_other_embeddings_is_refused(saved):
    file = saved[0] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 301}))
    with pytest.raises(checkpoint.CheckpointError, match=r"embed_tokens.weight has the shape \(300, 64\) in the checkpoint"):
        load(saved[0])


def test_codes_of_another_type_are_refused(saved):
    from safetensors.torch import load_file, save_file

    tensors = load_file(saved[0] / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.span"
    save_file(tensors | {name: tensors[name].float()}, saved[0] / "model.safetensors", {"format": "pt"})
    with pytest.raises(checkpoint.CheckpointError, match="up_proj.span is stored as F32, not as F16"):
        load(saved[0])


def test_pickled_weights_are_refused(saved):
    from safetensors.torch import load_file

    file = saved[0] / "model.safetensors"
    torch.save(load_file(file), saved[0] / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(checkpoint.CheckpointError, match="read from safetensors only"):
        load(saved[0])


def test_a_truncated_file_is_refused(saved):
    file = saved[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(checkpoint.CheckpointError, match="damaged or cut short"):
        load(saved[0])


def test_a_plain_model_is_no_checkpoint_of_ours(tiny, tmp_path):
    tiny.save_pretrained(tmp_path / "plain")
    with pytest.raises(checkpoint.CheckpointError, match="no quantization_config of windquant"):
        checkpoint.count(tmp_path / "plain")


def test_shards_are_small_beside_a_block(tiny):
    assert checkpoint.shard_bytes(tiny) == 32_000_000  # of 4 * 30,848 bytes a block


def test_a_writers_own_shard_size_holds(tmp_path):
    writer = checkpoint.Writer(tmp_path, 1000)
    for i in range(4):
        writer.add(f"t{i}", torch.zeros(400, dtype=torch.uint8))
    writer.close({}, 32)
    assert sorted(f.name for f in tmp_path.glob("*.safetensors")) == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
