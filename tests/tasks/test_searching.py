"""The allocate stage with true losses, on plans composed of a tiny supernet or rounded with error feedback."""

import contextlib
import shutil
from dataclasses import replace

import pytest
import torch

from tasks import allocate, models, packed, plans, progress, quantize, searching, store, supernet
from tasks.errors import UserError
from tasks.quantize import QuantizeConfig
from tasks.searching import AllocateConfig
from tasks.statistics import Protector, Statistics
from tasks.supernet import SupernetConfig
from tests.tasks.test_resume import STAGES, Cut, prepared, run, run_before  # noqa: F401
from windquant import blocks, candidates
from windquant.evaluate import log_probabilities, score
from windquant.feedback import Moments, round_with_feedback
from windquant.quantize import pack_matrix
from windquant.supernet import Composed

CONFIG = AllocateConfig(
    allocator="ppo", target_bits=2.75, windows=1, episodes=6, batch=3, losses=4, curriculum=[3.0], finalists=2, explore=2.0
)


@pytest.fixture
def ready(prepared, monkeypatch):  # noqa: F811
    """Everything before `allocate`, with a supernet of a few steps."""
    monkeypatch.setitem(STAGES, "supernet", (supernet.run, SupernetConfig(steps=3, tokens=20)))
    run_before("allocate")


def expected_of(model, ids):
    return lambda i: log_probabilities(model, ids[i])


def allocated(monkeypatch, fingerprint="x", **changes):
    monkeypatch.setitem(STAGES, "allocate", (allocate.run, replace(CONFIG, **changes)))
    return run("allocate", fingerprint)


def compared(out):
    columns = store.load_json(out / "summary.json")["compared"]
    return {name: {c: columns[c][i] for c in columns} for i, name in enumerate(columns["allocator"])}


def test_all_allocators_are_compared_at_equal_bits_and_the_searches_at_equal_losses(ready, monkeypatch):
    rows = compared(allocated(monkeypatch))
    assert list(rows) == ["uniform", "random", "sensitivity-rank", "lagrangian", "ppo", "evolution"]
    assert all(0.97 < r["budget_used"] <= 1 for r in rows.values()), rows
    assert rows["ppo"]["evaluations"] == rows["evolution"]["evaluations"] > 1
    assert rows["lagrangian"]["evaluations"] == 0


def test_no_search_ends_above_what_it_started_from_on_the_text_that_confirms(ready, monkeypatch):
    rows = compared(allocated(monkeypatch))
    assert all(rows[name]["kl_other_text"] <= rows["lagrangian"]["kl_other_text"] for name in ("ppo", "evolution"))


def test_the_plan_asked_for_the_one_to_beat_and_the_uniform_one_are_written(ready, monkeypatch):
    for name in ("ppo", "evolution"):
        out = allocated(monkeypatch, name, allocator=name)
        assert {f.name for f in out.glob("*.parquet")} == {f"{name}.parquet", "lagrangian.parquet", "uniform.parquet"}
        plan = plans.load_plan(out / f"{name}.parquet")
        assert plan.header["allocator"] == name and 0.98 * 2.75 < plan.effective_bits <= 2.75
        assert store.load_json(out / "summary.json")["chosen"] == name


def test_true_losses_after_error_feedback_are_those_of_matrices_rounded_under_the_references_moments(ready, monkeypatch):
    monkeypatch.setattr(searching, "compute_fast", lambda device: False)
    monkeypatch.setattr(candidates, "compute", lambda device: contextlib.nullcontext())
    out = allocated(monkeypatch, loss="feedback", curriculum=[], episodes=3, losses=2)
    rows = compared(out)
    assert rows["ppo"]["evaluations"] == rows["evolution"]["evaluations"]
    source, cpu = store.path("prepare") / "model", torch.device("cpu")
    ids = store.load_tensors(store.path("prepare") / "windows" / "train.safetensors")["ids"].long()
    picked = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[:1]]
    for name in ("uniform", "lagrangian"):
        model, plan = models.reference(source, cpu), plans.load_plan(out / f"{name}.parquet")
        protect, statistics, chunk = Protector(plan.protection), Statistics(), plan.header["chunk_size"]
        for m in blocks.matrices(model):
            layer, inner = model.get_submodule(m.name), m.name.split(".", 3)[-1]
            salient = protect(m.block, inner, layer.weight)
            moments = Moments.of(statistics.moment(m.block, inner), chunk)
            rounded = round_with_feedback(layer.weight, moments, plan.of(m.name), salient)
            layer.weight.copy_(pack_matrix(rounded, chunk, salient)[1])
        expected = score(model, picked, picked.shape[1], expected_of(models.reference(source, cpu), picked)).kl
        assert rows[name]["kl"] == pytest.approx(expected, abs=2e-5)  # the reference's are kept in half precision


def test_after_error_feedback_plans_are_confirmed_as_their_checkpoints_will_be(ready, monkeypatch):
    out = allocated(monkeypatch, loss="feedback", curriculum=[], episodes=3, losses=2)
    rows = compared(out)
    shutil.copytree(out, store.path("allocate"))
    monkeypatch.setitem(STAGES, "quantize", (quantize.run, QuantizeConfig("feedback", check_tokens=16)))
    folder = run("quantize")
    ids = store.load_tensors(store.path("prepare") / "windows" / "train.safetensors")["ids"].long()
    picked = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[1:2]]
    reference = models.reference(store.path("prepare") / "model", torch.device("cpu"))
    for name in ("uniform", "lagrangian", "ppo"):
        loaded = packed.load(folder / name, torch.device("cpu"))
        expected = score(loaded, picked, picked.shape[1], expected_of(reference, picked)).kl
        assert rows[name]["kl_other_text"] == pytest.approx(expected, rel=0.1)  # in bfloat16 where the machine has it


def test_a_search_cut_off_goes_on_to_the_same_bytes(ready, monkeypatch):
    whole = store.hash_tree(allocated(monkeypatch, "whole"))
    bar = progress.bar
    for at in (1, 3, 5):
        calls = []

        def cutting(label, calls=calls, at=at):
            def report(done, total):
                calls.append(done)
                if len(calls) == at:
                    raise Cut

            return report

        monkeypatch.setattr(progress, "bar", cutting)
        with pytest.raises(Cut):
            allocated(monkeypatch, f"cut {at}")
        monkeypatch.setattr(progress, "bar", bar)
        assert store.hash_tree(allocated(monkeypatch, f"cut {at}")) == whole


def test_every_target_of_the_curriculum_has_its_own_curves(ready, monkeypatch):
    records = []
    monkeypatch.setitem(STAGES, "allocate", (lambda c, job: records.append(allocate.run(c, job)), CONFIG))
    run("allocate")
    children = records[0].children
    assert list(children) == ["ppo 0, 3 bits", "ppo 1, 2.75 bits"]
    for child in children.values():
        assert child.curves["episodes"] == [3, 6]
        assert {"policy_loss", "mu", "entropy", "kl", "clip_fraction", "explained_variance"} <= child.curves.keys()


def test_a_saved_policy_is_where_another_search_starts(ready, monkeypatch):
    shutil.copytree(allocated(monkeypatch, "first"), "saved")
    policy, standard = searching.load_policy(store.Path("saved/policy.safetensors"))
    begun = []
    search = searching.Search
    monkeypatch.setattr(searching, "Search", lambda *args: (begun.append(args), search(*args))[1])
    allocated(monkeypatch, "second", policy="saved/policy.safetensors", curriculum=[])
    start = begun[0][7]
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), start.parameters(), strict=True))
    assert torch.equal(
        store.load_tensors(store.state("allocate") / "out" / "policy.safetensors")["standard.mean"], standard.mean
    )


def test_a_policy_is_applied_to_another_target_without_training(ready, monkeypatch):
    shutil.copytree(allocated(monkeypatch, "first"), "saved")
    out = allocated(monkeypatch, "second", policy="saved/policy.safetensors", target_bits=2.9, episodes=0)
    saved = store.load_tensors(store.Path("saved/policy.safetensors"))
    kept = store.load_tensors(out / "policy.safetensors")
    assert all(torch.equal(t, kept[name]) for name, t in saved.items())
    rows = compared(out)
    assert rows["ppo"]["evaluations"] <= 2 and rows["ppo"]["kl_other_text"] <= rows["lagrangian"]["kl_other_text"]
    assert 0.98 * 2.9 < plans.load_plan(out / "ppo.parquet").effective_bits <= 2.9


def test_a_policy_of_other_states_is_refused(ready, monkeypatch):
    shutil.copytree(allocated(monkeypatch, "first"), "saved")
    said = store.load_json(store.Path("saved/policy.json"))
    store.save_json(store.Path("saved/policy.json"), said | {"version": 0})
    with pytest.raises(UserError, match=r"was learned on states of version 0 .* this release's have version 1"):
        allocated(monkeypatch, "second", policy="saved/policy.safetensors")


def test_what_is_no_policy_is_refused_in_a_sentence(ready, monkeypatch):
    shutil.copytree(allocated(monkeypatch, "first"), "saved")
    said = store.load_json(store.Path("saved/policy.json"))
    said.pop("temperature")
    store.save_json(store.Path("saved/policy.json"), said)
    for name in ("saved/policy.safetensors", "nowhere.safetensors", "saved"):
        with pytest.raises(UserError, match="is not a policy .* or set allocate.policy to null"):
            allocated(monkeypatch, "second", policy=name)
    with pytest.raises(UserError, match="lies where this stage writes; copy it"):
        allocated(monkeypatch, "third", policy="artifacts/allocate/policy.safetensors")


def test_a_loss_that_is_no_number_is_refused_again_when_the_stage_is_run_again(ready, monkeypatch):
    monkeypatch.setattr(Composed, "divergence", lambda *args: float("nan"))
    for _ in range(2):
        with pytest.raises(ValueError, match="the true loss of a plan is NaN or Inf"):
            allocated(monkeypatch, "same")


def test_evolution_has_as_many_true_losses_as_all_stages_of_the_curriculum(ready, monkeypatch):
    known = []
    search = searching.Search
    monkeypatch.setattr(searching, "Search", lambda *args: (known.append(search(*args)), known[-1])[1])
    rows = compared(allocated(monkeypatch, curriculum=[3.0, 2.9]))
    assert rows["evolution"]["evaluations"] == sum(len(s.loss.known) for s in known) and len(known) == 3


def test_units_rounded_to_nearest_are_those_that_quantize_would_write(prepared, monkeypatch):  # noqa: F811
    """A plan composed of them is the model as quantized without error feedback."""
    run_before("allocate")
    shutil.copytree(allocated(monkeypatch), store.path("allocate"))
    monkeypatch.setitem(STAGES, "quantize", (quantize.run, QuantizeConfig("rounding", check_tokens=16)))
    folder = run("quantize") / "ppo"
    plan = plans.load_plan(folder / "plan.parquet")
    net = Composed(models.reference(store.path("prepare") / "model", torch.device("cpu")), plan.body, searching.units_of)
    net.set(plan.bits)
    loaded = packed.load(folder, torch.device("cpu")).dequantize()
    for name in net.layers:
        assert torch.equal(net.layers[name].weight, loaded.get_submodule(name).weight.float())


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"target_bits": 5.0}, "5 bits lie outside what the supernet was learned for, 1.9 to 3.1"),
    ({"curriculum": [8.0]}, "8 bits lie outside"),
    ({"windows": 3}, "asks for 6 windows of training text, half of them to confirm plans on, and there are 4"),
])  # fmt: skip
def test_what_a_search_cannot_do_is_said_in_a_sentence(ready, monkeypatch, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        allocated(monkeypatch, **changes)


@pytest.mark.parametrize(("given", "sentence"), [
    ({"allocator": "greedy"}, "allocator 'greedy' is unknown; choose one of uniform, random, sensitivity-rank, lagrangian, ppo"),
    ({"finalists": 0}, "finalists 0 is not above 0"), ({"windows": 0}, "windows 0 is not above 0"),
    ({"curriculum": [3.0, 0.0]}, "curriculum holds 0"), ({"lr": 0.0}, "lr 0 is not above 0"),
    ({"episodes": -1}, "episodes -1 is below 0"), ({"allocator": "ppo", "episodes": 0}, "episodes 0 takes ppo's policy as it is"), ({"target_bits": 20.0}, "target_bits 20 is not"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        AllocateConfig(**given)


@pytest.mark.parametrize(("given", "sentence"), [
    ({"steps": -1}, "steps -1 is negative"), ({"batch": 0}, "batch 0 is not at least 1"), ({"units": -0.1}, "units -0.1 is"),
    ({"lowest_bits": 3.0, "highest_bits": 2.0}, "lowest_bits 3 and highest_bits 2 are not two targets"),
])  # fmt: skip
def test_supernets_out_of_range_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        SupernetConfig(**given)
