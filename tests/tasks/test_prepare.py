import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks import store
from tasks.config import Common, resolve
from tasks.errors import UserError
from tasks.job import Job
from tasks.models import reference, shards, skeleton, weight_source
from tasks.prepare import PrepareConfig, run
from tests.conftest import architecture, article

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and datasets' own


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/sources").mkdir(parents=True)
    rows = [json.dumps({"text": article(i)}) + "\n" for i in range(40)]
    Path("data/sources/text.jsonl").write_text("".join(rows))
    out = Path("out")
    out.mkdir()
    return Job("prepare", Common(), out, store.Scratch("prepare", "x"))


def prepare(job, folder, **changes):
    config = PrepareConfig(**{"model": f"path:{folder}", "text": "path:data/sources/text.jsonl", "window": 32,
                              "eval_window": 32, "eval_stride": 32, "calibration_windows": 4} | changes)  # fmt: skip
    return run(resolve(config, "demo"), job)


def test_a_models_weights_arrive_unchanged(job, tiny, tiny_folder):
    prepare(job, tiny_folder)
    found = weight_source(job.out / "model")(lambda name: True)
    assert all(torch.equal(found[name], p) for name, p in tiny.named_parameters())


def test_weights_under_other_names_are_mapped(job, tiny, tiny_folder):
    """As a base model is saved: without the prefix `model.`."""
    file = tiny_folder / "model.safetensors"
    save_file({k.removeprefix("model."): v for k, v in load_file(file).items()}, file, {"format": "pt"})
    prepare(job, tiny_folder)
    found = weight_source(job.out / "model")(lambda name: True)
    assert {name for name, _ in skeleton(tiny.config).named_parameters()} <= found.keys()
    assert all(torch.equal(found[name], p) for name, p in tiny.named_parameters())


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])  # on disk: our names, other names, fused
def test_experts_arrive_one_by_one(job, tiny_folder, name):
    """The same products, added up in another order: float32 rounding."""
    original = architecture(name)
    original.save_pretrained(tiny_folder)
    prepare(job, tiny_folder)
    assert {n for n, _ in skeleton(original.config).named_parameters()} <= shards(job.out / "model").keys()
    loaded, ids = reference(job.out / "model", torch.device("cpu")), torch.arange(30)[None]
    torch.testing.assert_close(loaded(ids).logits, original(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_folder_without_a_tokenizer_is_refused(job, tiny, tmp_path):
    tiny.save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="has no tokenizer that transformers can read; put the model's tokenizer.json"):
        prepare(job, tmp_path / "bare")


def test_a_folder_without_weights_is_refused(job, tiny_folder):
    (tiny_folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors; save the model with `save_pretrained`"):
        prepare(job, tiny_folder)


def test_a_model_quantized_already_is_refused(job, tiny_folder):
    file = tiny_folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UserError, match="is quantized already; give the original"):
        prepare(job, tiny_folder)


def test_weights_of_another_shape_are_refused(job, tiny_folder):
    file = tiny_folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 128}))
    with pytest.raises(UserError, match=r"mlp\.\w+\.weight in .* has the shape .* its config\.json says .*128"):
        prepare(job, tiny_folder)


def test_too_few_calibration_windows_are_refused(job, tiny_folder):
    with pytest.raises(UserError, match=r"gives \d+ windows of 32 tokens, prepare\.calibration_windows asks for 5000"):
        prepare(job, tiny_folder, calibration_windows=5000)


def test_another_models_tokenizer_is_refused(job, tiny_folder):
    from transformers import LlamaForCausalLM

    from tests.conftest import tiny_config

    LlamaForCausalLM(tiny_config(vocab_size=100)).save_pretrained(tiny_folder)
    with pytest.raises(UserError, match=r"the tokenizer has \d+ tokens, the model's embeddings 100: they do not belong"):
        prepare(job, tiny_folder)


def test_the_target_is_checked_before_the_weights_are_read(job, tiny_folder):
    def refuse(model):
        raise UserError("out of reach")

    with pytest.raises(UserError, match="out of reach"):
        prepare(Job("prepare", Common(), job.out, job.scratch, refuse), tiny_folder)
    assert not any(job.out.iterdir())
