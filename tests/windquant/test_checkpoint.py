import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM

import windquant  # noqa: F401  registers the format with transformers
from tests.conftest import architecture, taken_apart, tiny_config
from windquant import blocks, checkpoint, embeddings
from windquant.quantize import quantize_matrix
from windquant.salient import Protection, protect, total_size
from windquant.units import cut, weights_in

CHUNK = 32
WIDTHS = (2, 3, 16, 1.58, 1, 4, 8)


def plan_of(model, widths=WIDTHS):
    """All widths mixed."""
    return {
        m.name: [widths[(i + j) % len(widths)] for j in range(-(-m.columns // CHUNK))]
        for i, m in enumerate(blocks.matrices(model))
    }


def save(model, folder, widths=WIDTHS, embedding_bits=None, protection=None, made_from=""):
    """A checkpoint of the model; the model's own weights become what was stored."""
    plan, tables = plan_of(model, widths), embeddings.matrices(model) if embedding_bits else []
    body = {m.name: checkpoint.entry(m, plan[m.name]) for m in blocks.matrices(model)}
    packed_tables = {m.name: checkpoint.entry(m, [embedding_bits] * (m.columns // CHUNK)) for m in tables}
    protected = (protection.mode, protection.share) if protection else ("none", 0.0)
    writer = checkpoint.Writer(folder, checkpoint.Quantization(CHUNK, body, packed_tables, *protected, made_from))
    for m in blocks.matrices(model):
        linear = model.get_submodule(m.name)
        salient = protect(linear.weight, torch.ones(m.columns), protection) if protection else None
        packed, dense = quantize_matrix(linear.weight, torch.eye(m.columns), plan[m.name], CHUNK, salient)
        writer.add_matrix(m.name, packed)
        linear.weight.data.copy_(dense)
    for m in tables:
        weight = model.get_submodule(m.name).weight
        packed, dense = embeddings.quantize(weight.data, embedding_bits, CHUNK)
        writer.add_matrix(m.name, packed)
        weight.data.copy_(dense)
    for name, p in checkpoint.others(model, tables).items():
        writer.add(name, checkpoint.store_other(name, p))
        p.data.copy_(checkpoint.store_other(name, p).float())
    writer.close(model.config.to_dict())
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
    with pytest.raises(checkpoint.CheckpointError, match="was not written with the plan that config.json has now"):
        load(protected[0])


def test_salient_weights_that_config_json_does_not_name_are_refused(protected):
    edit(protected[0], lambda q: q.update(salient="none"))
    with pytest.raises(checkpoint.CheckpointError, match="was not written with the plan that config.json has now"):
        load(protected[0])


def test_salient_weights_that_are_missing_are_refused(saved):
    edit(saved[0], lambda q: q.update(salient="weights", salient_share=0.05))
    with pytest.raises(checkpoint.CheckpointError, match="was not written with the plan that config.json has now"):
        load(saved[0])


@pytest.mark.parametrize("change", [{"salient": "rows"}, {"salient": "weights", "salient_share": 0.5}])
def test_an_unknown_protection_is_refused(saved, change):
    edit(saved[0], lambda q: q.update(change))
    with pytest.raises(checkpoint.CheckpointError, match="salient.* (is unknown|is not between)"):
        load(saved[0])


def rewrite(folder, change):
    """change: tensors -> the tensors to put in their place; None takes one away."""
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as f:
        metadata = f.metadata()
    tensors = load_file(file)
    save_file({k: t for k, t in (tensors | change(tensors)).items() if t is not None}, file, metadata)


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
    with pytest.raises(checkpoint.CheckpointError, match="format version 99, this release reads 2"):
        load(saved[0])


def test_a_tampered_plan_is_refused(saved):
    def widen(q):
        q["plan"]["model.layers.0.self_attn.q_proj"][2] = "88"

    edit(saved[0], widen)
    with pytest.raises(checkpoint.CheckpointError, match="was not written with the plan that config.json has now"):
        load(saved[0])


def test_a_plan_that_misses_a_matrix_is_refused(saved):
    edit(saved[0], lambda q: q["plan"].pop("model.layers.1.mlp.up_proj"))
    with pytest.raises(checkpoint.CheckpointError, match="was not written with the plan that config.json has now"):
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
    name = "model.layers.0.mlp.up_proj.span"
    rewrite(saved[0], lambda tensors: {name: tensors[name].float()})
    with pytest.raises(checkpoint.CheckpointError, match="up_proj.span is stored as F32, not as F16"):
        load(saved[0])


def test_pickled_weights_are_refused(saved):
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
    writer = checkpoint.Writer(tmp_path, checkpoint.Quantization(32, {}, {}), 1000)
    for i in range(4):
        writer.add(f"t{i}", torch.zeros(400, dtype=torch.uint8))
    writer.close({})
    assert sorted(f.name for f in tmp_path.glob("*.safetensors")) == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


Q = "model.layers.0.self_attn.q_proj"


def turn_round(q):
    entry = next(e for e in q["plan"].values() if e[2][0] != e[2][-1] and e[1] % CHUNK == 0)
    entry[2] = entry[2][::-1]


@pytest.mark.parametrize("change", [turn_round, lambda q: q.update(chunk_size=40)])  # 64 columns are two chunks of both
def test_a_plan_that_was_changed_without_changing_its_size_is_refused(tiny, tmp_path, change):
    """No shape tells: with 2 bits everywhere all of these load into tensors of the very same shapes."""
    folder = save(tiny, tmp_path / "q", widths=(2, 1.58))
    edit(folder, change)
    for read in (load, checkpoint.count):
        with pytest.raises(checkpoint.CheckpointError):
            read(folder)


@pytest.mark.parametrize("change, says", [
    (lambda q: q.update(chunk_size=0), "chunk_size 0 is not a number of columns"),
    (lambda q: q.update(chunk_size="32"), "chunk_size '32' is not a number of columns"),
    (lambda q: q.pop("chunk_size"), "lacks chunk_size"),
    (lambda q: q.pop("plan"), "lacks plan"),
    (lambda q: q.update(plan=[1]), "plan is a list"),
    (lambda q: q["plan"].update({Q: 7}), f"{Q}: 7 is not rows, columns and one letter a unit"),
    (lambda q: q["plan"].update({Q: ["64", 64, "22"]}), "is not rows, columns and one letter a unit"),
    (lambda q: q["plan"].update({Q: [64, 64, 22]}), "is not rows, columns and one letter a unit"),
    (lambda q: q.update(embeddings={"model.embed_tokens": [300, 64]}), "is not rows, columns and one letter a unit"),
    (lambda q: q.update(salient_share="x"), "salient_share 'x' is not between"),
    (lambda q: q.update(salient_share=10**400), "salient_share 1000.* is not between"),
    (lambda q: q.update(made_from=7), "made_from 7 is not a hash"),
    (lambda q: q.update(version=2.0), "format version 2.0, this release reads 2"),
    (lambda q: q.update(embeddings=None), "embeddings is a NoneType"),
    (lambda q: q.update(embeddings={"model.embed_tokens": [300, 64, "33"]}), "an embedding is packed at 4 or 8 bits, not '33'"),
    (lambda q: q.update(salient=["weights"]), "salient .* is unknown"),
    (lambda q: q.update(version="1"), "format version '1', this release reads 2"),
])  # fmt: skip
def test_a_damaged_config_is_refused_in_a_sentence(saved, change, says):
    edit(saved[0], change)
    for read in (load, checkpoint.count):
        with pytest.raises(checkpoint.CheckpointError, match=says):
            read(saved[0])


def test_a_quantization_config_that_is_no_object_is_refused(saved):
    file = saved[0] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": [1]}))
    with pytest.raises(checkpoint.CheckpointError, match="not a checkpoint of ours"):
        checkpoint.count(saved[0])


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "b"}}']
)
def test_a_damaged_index_is_refused(saved, text):
    (saved[0] / "model.safetensors").unlink()
    (saved[0] / "model.safetensors.index.json").write_text(text)
    with pytest.raises(checkpoint.CheckpointError, match=r"index.json is damaged"):
        checkpoint.files(saved[0])


@pytest.mark.parametrize("part", ["codes", "scale", "span"])
def test_a_missing_tensor_is_not_counted_over(saved, part):
    rewrite(saved[0], lambda tensors: {f"{Q}.{part}": None})
    for read in (load, checkpoint.count):
        with pytest.raises(checkpoint.CheckpointError, match=f"lacks the tensor {Q}.{part}"):
            read(saved[0])


def test_a_tensor_of_a_foreign_type_is_refused(saved):
    name = "model.norm.weight"
    rewrite(saved[0], lambda tensors: {name: tensors[name].to(torch.float8_e4m3fn)})
    with pytest.raises(checkpoint.CheckpointError, match="model.norm.weight is stored as F8_E4M3"):
        load(saved[0])


@pytest.mark.parametrize("part", ["span", "salient_span"])
def test_scales_that_are_no_numbers_are_refused_by_name(protected, part):
    for value in (float("nan"), float("inf"), 200.0, 65504.0):  # 2^200 is infinite
        rewrite(protected[0], lambda tensors, v=value: {f"{Q}.{part}": torch.full_like(tensors[f"{Q}.{part}"], v)})
        with pytest.raises(
            checkpoint.CheckpointError, match=f"{Q}: the range of its .*scales holds NaN, or reaches infinity"
        ):
            load(protected[0])


@pytest.mark.parametrize(
    "change", [lambda t: torch.full_like(t, float("nan")), lambda t: t.to(torch.uint8), lambda t: t.long()]
)
def test_a_norm_that_is_no_number_is_refused_by_name(saved, change):
    rewrite(saved[0], lambda tensors: {"model.norm.weight": change(tensors["model.norm.weight"])})
    with pytest.raises(checkpoint.CheckpointError, match=r"model.norm.weight (holds NaN|is stored as \w+, not as F16)"):
        load(saved[0])


def test_a_file_beside_an_index_is_refused(saved):
    (saved[0] / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {"a": "model.safetensors"}}')
    with pytest.raises(checkpoint.CheckpointError, match=r"holds model.safetensors and model.safetensors.index.json"):
        checkpoint.files(saved[0])


def test_shards_of_two_checkpoints_with_one_plan_are_not_mixed(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append(save(LlamaForCausalLM(tiny_config()), tmp_path / str(seed), made_from=str(seed)))
    name = next(made[0].glob("model-00002-of-*")).name
    (made[0] / name).write_bytes((made[1] / name).read_bytes())
    for read in (load, checkpoint.count):
        with pytest.raises(checkpoint.CheckpointError, match="was not written with the plan that config.json has now"):
            read(made[0])


def test_a_plan_for_a_vector_is_refused(saved):
    edit(saved[0], lambda q: q["plan"].update({"model.norm": [64, 64, "22"]}))
    with pytest.raises(checkpoint.CheckpointError, match="model.norm is 64 x 64 in the plan and 64 by config.json"):
        load(saved[0])


def test_a_model_without_a_head_says_what_to_load_it_with(saved):
    with pytest.raises(checkpoint.CheckpointError, match="LlamaModel has no .* head; load with AutoModelForCausalLM"):
        AutoModel.from_pretrained(saved[0])


def test_a_used_folder_is_refused(saved):
    with pytest.raises(checkpoint.CheckpointError, match="holds model.safetensors already"):
        checkpoint.Writer(saved[0], checkpoint.Quantization(CHUNK, {}, {}))


def test_a_checkpoint_is_closed_only_when_the_plans_matrices_are_there(saved, tmp_path):
    writer = checkpoint.Writer(tmp_path / "new", checkpoint.read_quantization(saved[0]))
    writer.add("x", torch.zeros(1))
    with pytest.raises(checkpoint.CheckpointError, match=r"\.codes was never written"):
        writer.close({})


def test_a_matrix_that_is_not_the_plans_is_refused(saved, tmp_path):
    quantization = checkpoint.read_quantization(saved[0])
    packed, _ = quantize_matrix(torch.randn(64, 64), torch.eye(64), [3, 3], CHUNK)
    with pytest.raises(checkpoint.CheckpointError, match=f"{Q} was packed as '33', the plan has"):
        checkpoint.Writer(tmp_path / "new", quantization).add_matrix(Q, packed)


def test_others_may_read_the_files(saved):
    assert (saved[0] / "model.safetensors").stat().st_mode == (saved[0] / "config.json").stat().st_mode


def test_routers_and_biases_are_neither_embeddings_nor_heads(tmp_path):
    model = taken_apart(architecture("gpt_oss"))
    counted = checkpoint.count(save(model, tmp_path / "q", widths=(3,)))
    assert (counted.embeddings, counted.head) == (2 * 300 * 64, 0)
    assert counted.other == sum(2 * t.numel() for n, t in checkpoint.others(model).items() if "embed" not in n)


@pytest.mark.parametrize("value", [float("nan"), 1e5])
def test_what_float16_cannot_hold_is_named(value):
    with pytest.raises(checkpoint.InputError, match="model.norm holds a value that float16 cannot"):
        checkpoint.store_other("model.norm", torch.tensor([1.0, value]))
    assert checkpoint.store_other("empty", torch.empty(0)).shape == (0,)
