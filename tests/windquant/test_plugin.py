import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.conftest import tiny_config, tiny_tokenizer
from tests.windquant.test_checkpoint import save
from windquant import checkpoint
from windquant.layers import PackedLinear
from windquant.plugin import WindquantConfig
from windquant.salient import Protection

IDS = torch.arange(30)[None]


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32} | options)


CASES = [(True, None, None), (False, None, None), (True, 8, None), (False, 8, None), (True, 4, None),
         (True, 8, Protection("weights", 0.05)), (True, 8, Protection("columns", 0.05))]  # fmt: skip


@pytest.fixture(params=CASES, ids=str)
def case(request, tmp_path):
    """A packed checkpoint, and the same weights in memory: head tied or not, embeddings packed or not, salient weights."""
    tied, bits, protection = request.param
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(tie_word_embeddings=tied)).eval()
    return save(model, tmp_path / "q", embedding_bits=bits, protection=protection), model


@torch.inference_mode()
def test_logits_are_those_of_the_dense_model_bit_for_bit(case):
    folder, model = case
    assert torch.equal(load(folder)(IDS).logits, model(IDS).logits)


@torch.inference_mode()
def test_saved_and_loaded_again_it_is_the_same(case, tmp_path):
    loaded = load(case[0])
    loaded.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    old, new = loaded.state_dict(), again.state_dict()
    assert old.keys() == new.keys()
    assert all(new[k].dtype == v.dtype and torch.equal(new[k], v) for k, v in old.items())
    assert torch.equal(again(IDS).logits, loaded(IDS).logits)
    assert checkpoint.count(tmp_path / "again").body == checkpoint.count(case[0]).body


def test_a_tied_head_has_no_table_of_its_own(case):
    folder, model = case
    loaded = load(folder)
    tied = model.config.tie_word_embeddings
    stored = {name for name in checkpoint.headers(checkpoint.files(folder)) if name.startswith("lm_head")}
    assert bool(stored) == (not tied)
    size = sum(t.nbytes for t in {id(t): t for t in (*loaded.parameters(), *loaded.buffers())}.values())
    rest = sum(2 * p.numel() for p in loaded.parameters())  # held in float32, stored in float16
    assert size < 1.1 * (checkpoint.count(folder).model + rest)


@torch.inference_mode()
def test_dequantized_it_is_the_dense_model(case):
    folder, model = case
    dense = load(folder).dequantize()
    assert not any(isinstance(m, PackedLinear) for m in dense.modules())
    assert torch.equal(dense(IDS).logits, model(IDS).logits)
    assert (dense.lm_head.weight is dense.model.embed_tokens.weight) == model.config.tie_word_embeddings


def test_it_generates(case):
    folder, model = case
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(load(folder).generate(IDS, **options), model.generate(IDS, **options))


def test_a_cast_of_the_model_leaves_the_packed_tensors(case):
    loaded = load(case[0]).to(torch.bfloat16)
    assert loaded(IDS).logits.dtype == torch.bfloat16
    assert all(b.dtype == torch.float16 for name, b in loaded.named_buffers() if name.endswith("span"))
    with pytest.raises(ValueError, match="not supported for quantized model"):
        loaded.half()


def test_sharded_by_transformers_it_loads(case, tmp_path):
    loaded = load(case[0])
    loaded.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 1
    assert torch.equal(load(tmp_path / "sharded")(IDS).logits, loaded(IDS).logits)


def test_a_bias_is_loaded(tmp_path):
    model = LlamaForCausalLM(tiny_config(attention_bias=True)).eval()
    torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.bias)
    folder = save(model, tmp_path / "q")
    assert torch.equal(load(folder)(IDS).logits, model(IDS).logits)


def test_a_dense_model_is_not_quantized_on_the_fly(tiny_folder):
    with pytest.raises(ValueError, match="does require the model to be pre-quantized"):
        load(tiny_folder, quantization_config=WindquantConfig(**checkpoint.Quantization(32, {}, {}).to_dict()))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # lm-eval hands over the model's own
def test_lm_eval_takes_the_folder(case):
    from lm_eval.models.huggingface import HFLM

    tiny_tokenizer().save_pretrained(case[0])
    lm = HFLM(pretrained=str(case[0]), device="cpu", batch_size=1)  # pyright: ignore
    assert isinstance(lm.model.model.layers[0].mlp.up_proj, PackedLinear)


def test_importing_windquant_is_enough_and_loads_nothing(tiny, tmp_path):
    folder = save(tiny, tmp_path / "q")
    code = f"""
import sys, windquant
assert not {{"torch", "transformers"}} & sys.modules.keys()
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(folder)!r})
assert type(model.model.layers[0].mlp.up_proj).__name__ == "PackedLinear"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_transformers_may_come_first(tiny, tmp_path):
    folder = save(tiny, tmp_path / "q")
    code = f"""
from transformers import AutoModelForCausalLM, PreTrainedModel
import windquant
model = AutoModelForCausalLM.from_pretrained({str(folder)!r})
assert type(model.model.layers[0].mlp.up_proj).__name__ == "PackedLinear"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
