"""Stages cut off in the middle and run again give the bytes of a run in one piece."""

import itertools
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks import allocate, calibrate, plans, progress, quantize, sensitivity, store, supernet
from tasks.calibrate import CalibrateConfig
from tasks.config import Common
from tasks.job import Job
from tasks.quantize import QuantizeConfig
from tasks.searching import AllocateConfig
from tasks.supernet import SupernetConfig
from tests.conftest import architecture
from windquant import checkpoint
from windquant.sensitivity import SensitivityConfig

STAGES = {
    "calibrate": (calibrate.run, CalibrateConfig()),
    "sensitivity": (sensitivity.run, SensitivityConfig(chunk_size=32)),
    "supernet": (supernet.run, SupernetConfig(steps=0)),
    "allocate": (allocate.run, AllocateConfig(target_bits=2.75, allocator="lagrangian")),
    "quantize": (quantize.run, QuantizeConfig(check_tokens=16, steps=4)),
}


class Cut(Exception):
    pass


def run(stage, fingerprint="x"):
    out = store.state(stage) / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    function, config = STAGES[stage]
    function(config, Job(stage, Common(), out, store.Scratch(stage, fingerprint)))
    return out


def run_before(stage):
    """All earlier stages, their artifacts in place."""
    for earlier in itertools.takewhile(lambda s: s != stage, STAGES):
        shutil.copytree(run(earlier), store.path(earlier))


@pytest.fixture
def prepared(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, store.path("prepare") / "model")
    ids = torch.arange(120, dtype=torch.int32).view(4, 30)
    for split in ("calibration", "validation", "train"):
        store.save_tensors(store.path("prepare") / "windows" / f"{split}.safetensors", {"ids": ids})
    manifest = {"model": "path:model", "model_hash": "0", "text": "path:text", "text_hash": "1"}
    store.save_json(store.path("prepare") / "manifest.json", manifest)


def protecting(monkeypatch, salient):
    """From here on salient weights are kept."""
    config = SensitivityConfig(chunk_size=32, salient=salient, salient_share=0.05)
    monkeypatch.setitem(STAGES, "sensitivity", (sensitivity.run, config))


@pytest.mark.parametrize(("stage", "at", "salient"), [
    ("calibrate", 2, "none"), ("calibrate", 4, "none"), ("sensitivity", 1, "none"), ("quantize", 1, "none"),
    ("quantize", 3, "none"), ("sensitivity", 1, "weights"), ("quantize", 3, "weights"), ("quantize", 1, "columns"),
])  # fmt: skip
def test_a_stage_cut_off_goes_on_to_the_same_bytes(prepared, monkeypatch, stage, at, salient):
    protecting(monkeypatch, salient)
    run_before(stage)
    whole = store.hash_tree(run(stage, "whole"))
    calls, computed = [], []

    def bar(label):
        def report(done, total):
            calls.append(done)
            if len(calls) == at:
                raise Cut

        return report

    monkeypatch.setattr(progress, "bar", bar)
    with pytest.raises(Cut):
        run(stage, "cut")
    put = store.Scratch.put
    monkeypatch.setattr(store.Scratch, "put", lambda self, name, t: (computed.append(name), put(self, name, t)))
    assert store.hash_tree(run(stage, "cut")) == whole
    total = {"calibrate": 5, "sensitivity": 2, "quantize": 8}[stage]
    assert 0 < len(computed) < total  # the rest was taken from the resume state


@pytest.mark.parametrize("salient", ["none", "weights", "columns"])
def test_every_treatment_makes_other_weights_of_the_same_size(prepared, monkeypatch, salient):
    protecting(monkeypatch, salient)
    run_before("quantize")
    made = {}
    for treatment in ("rounding", "feedback", "reconstruction"):
        config = QuantizeConfig(treatment, check_tokens=16, steps=4)
        monkeypatch.setitem(STAGES, "quantize", (quantize.run, config))
        file = run("quantize", treatment) / "lagrangian" / "model.safetensors"
        made[store.hash_file(file)] = file.stat().st_size
        assert f"| treatment | {treatment} |" in (file.parent / "README.md").read_text()
    assert len(made) == 3 and len(set(made.values())) == 1


@pytest.mark.parametrize("treatment", ["rounding", "feedback", "reconstruction"])
@pytest.mark.parametrize("salient", ["weights", "columns"])
def test_table_plan_and_checkpoint_agree_on_salient_weights(prepared, monkeypatch, salient, treatment):
    """Chosen once, by the reference's activations, and paid for out of the target."""
    protecting(monkeypatch, salient)
    config = QuantizeConfig(treatment, check_tokens=16, steps=2)
    monkeypatch.setitem(STAGES, "quantize", (quantize.run, config))
    for stage in STAGES:
        shutil.copytree(run(stage), store.path(stage))
    folder = store.path("quantize") / "lagrangian"
    plan, counted = plans.load_plan(folder / "plan.parquet"), checkpoint.count(folder)
    table = plans.load_distortions(store.path("sensitivity") / "table.parquet")
    assert counted.salient == table.salient_bytes and counted.effective_bits == plan.effective_bits
    assert 0.97 * 2.75 < counted.effective_bits <= 2.75
    named = dict(AutoModelForCausalLM.from_pretrained(folder).named_modules())
    stored = [n for m in dict.fromkeys(u.matrix.name for u in plan.body) for n in named[m].salient.counts(32)]
    assert plan.salient == table.salient == stored and sum(stored) > 0


def test_a_plan_for_another_model_is_refused(prepared):
    run_before("quantize")
    file = store.path("allocate") / "lagrangian.parquet"
    plan = plans.load_plan(file)
    header = plan.header | {"target_bits": 16.0}
    other = plans.Plan(plan.body[:-1], plan.bits[:-1], header, plan.salient[:-1])
    plans.save_plan(file, other, [0.0] * len(other.bits))
    with pytest.raises(quantize.UserError, match="plan lagrangian is for another model than artifacts/prepare/model"):
        run("quantize")


def test_embeddings_at_a_width_of_none_are_refused(prepared):
    run_before("quantize")
    file = store.path("allocate") / "lagrangian.parquet"
    columns, header = store.load_table(file)
    store.save_table(file, columns, header | {"embedding_bits": 3})
    with pytest.raises(quantize.UserError, match="embedding_bits 3, which is not one of"):
        run("quantize")


def test_a_plan_for_other_weights_of_the_same_shapes_is_refused(prepared):
    run_before("quantize")
    file = store.path("prepare") / "manifest.json"
    store.save_json(file, store.load_json(file) | {"model_hash": "another"})
    with pytest.raises(quantize.UserError, match="plan lagrangian is for another model"):
        run("quantize")


@pytest.mark.parametrize("treatment", ["rounding", "feedback", "reconstruction"])
def test_experts_that_see_few_tokens_are_compared_like_all_others(prepared, monkeypatch, treatment):
    """Of 16 tokens most experts of eight see fewer than a packed layer unpacks its matrix for."""
    folder = store.path("prepare") / "model"
    shutil.rmtree(folder)
    architecture("qwen3_moe").save_pretrained(folder)
    config = QuantizeConfig(treatment, check_tokens=16, steps=2, export_dequantized=True)
    monkeypatch.setitem(STAGES, "quantize", (quantize.run, config))
    for stage in STAGES:
        shutil.copytree(run(stage), store.path(stage))
    checkpoint.files(store.path("quantize") / "lagrangian")


@pytest.mark.parametrize(
    ("kilobytes", "embedding_bits", "salient"), [(70, None, "none"), (52, 8, "none"), (42, 4, "none"), (85, None, "weights")]
)
def test_the_size_dial_keeps_the_whole_file_below_it(prepared, monkeypatch, kilobytes, embedding_bits, salient):
    protecting(monkeypatch, salient)
    run_before("allocate")
    monkeypatch.setitem(STAGES, "allocate", (allocate.run, AllocateConfig(allocator="lagrangian", target_size=f"{kilobytes}KB",
                                                                               embedding_bits=embedding_bits)))  # fmt: skip
    shutil.copytree(run("allocate"), store.path("allocate"))
    size = (run("quantize") / "lagrangian" / "model.safetensors").stat().st_size
    assert 900 * kilobytes < size <= 1000 * kilobytes
