"""The finetune stage, and the loop below it, on the tiny model."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from tasks import finetune, generate, models, packed, plans, progress, store, student
from tasks.errors import UserError
from tasks.finetune import FinetuneConfig
from tests.tasks.test_resume import STAGES, Cut, prepared, protecting, run, run_before  # noqa: F401
from windquant import checkpoint, qat
from windquant.errors import InputError

CONFIG = FinetuneConfig(
    steps=6, batch=1, lr=1e-3, pull_every=3, sigma=1e-3, save_every=2, eval_windows=2, eval_every=0, check_tokens=16
)
FIXED = {"codes": "fixed", "pull_every": 0, "sigma": 0.0}
pytestmark = pytest.mark.filterwarnings("ignore")  # Trainer's own


@pytest.fixture
def ready(prepared, monkeypatch):  # noqa: F811
    """Everything before `finetune`."""
    protecting(monkeypatch, "weights")
    monkeypatch.setitem(STAGES, "finetune", (finetune.run, CONFIG))
    run_before("finetune")


def tuned(monkeypatch, fingerprint="x", **changes):
    records = []
    config = replace(CONFIG, **changes)
    monkeypatch.setitem(STAGES, "finetune", (lambda c, job: records.append(finetune.run(c, job)), config))
    out = run("finetune", fingerprint)
    return out, records[0]


def test_the_trained_checkpoint_has_the_plans_bytes_and_other_weights(ready, monkeypatch):
    out, record = tuned(monkeypatch, lr=1e-2, train="all")
    folder, before = out / "lagrangian-trained", store.path("quantize") / "lagrangian"
    plan, count = plans.load_plan(folder / "plan.parquet"), checkpoint.count(folder)
    assert count.body == plan.size and count.model == checkpoint.count(before).model
    assert store.load_json(out / "bytes.json")["lagrangian-trained"]["effective_bits"] == plan.effective_bits
    loaded, old = (packed.load(f, torch.device("cpu")) for f in (folder, before))
    assert not torch.equal(loaded.model.layers[0].mlp.up_proj.codes, old.model.layers[0].mlp.up_proj.codes)
    assert not torch.equal(loaded.model.norm.weight, old.model.norm.weight)
    assert not torch.equal(loaded.model.embed_tokens.weight, old.model.embed_tokens.weight)
    assert "`python -m tasks finetune`" in (folder / "README.md").read_text()
    assert len(record.curves["loss"]) == 6


@pytest.mark.parametrize(("changes", "wanted"), [
    ({"train": "matrices"}, {"codes", "scale"}), ({"train": "norms"}, {"codes", "scale", "weight"}),
    (FIXED, {"scale", "weight"}), (FIXED | {"train": "matrices"}, {"scale"}),
])  # fmt: skip
def test_only_what_is_asked_for_is_trained(ready, monkeypatch, changes, wanted):
    out, _ = tuned(monkeypatch, lr=1e-2, lr_scales=0.1, **changes)
    files = (folder / "model.safetensors" for folder in (out / "lagrangian-trained", store.path("quantize") / "lagrangian"))
    new, old = (store.load_tensors(file) for file in files)
    moved = {name.rpartition(".")[2] for name, t in new.items() if not torch.equal(t, old[name])}
    assert moved == wanted and torch.equal(*(t["model.embed_tokens.weight"] for t in (new, old)))


def test_the_validation_texts_loss_is_measured_on_the_way_and_at_the_end(ready, monkeypatch):
    _, record = tuned(monkeypatch, steps=5, eval_every=2)
    curve = record.curves["validation_nll"]
    assert [step for step, nll in enumerate(curve, 1) if nll == nll] == [2, 4, 5]
    assert curve[-1] == pytest.approx(record.metrics["nll_after"], rel=1e-3)
    assert all(nll != nll for nll in tuned(monkeypatch, "never", steps=3, eval_every=0)[1].curves["validation_nll"])


def test_learning_brings_the_model_nearer_to_the_reference(ready, monkeypatch):
    _, record = tuned(monkeypatch, steps=40, train="matrices", pull_every=0, sigma=0.0)
    assert record.metrics["kl_after"] < 0.9 * record.metrics["kl_before"]


def test_the_first_steps_loss_is_that_of_the_quantized_checkpoint(ready, monkeypatch):
    """Without noise, and in the products' own precision: of the windows of the first step, whatever they are."""
    seen = []

    class Watched(student.Student):
        def forward(self, input_ids, labels=None):
            if not seen:
                model = packed.load(store.path("quantize") / "lagrangian", torch.device("cpu"))
                with torch.no_grad():
                    logp = model(input_ids=input_ids).logits[:, :-1].float().log_softmax(-1)
                seen.append(float(torch.nn.functional.nll_loss(logp.flatten(0, 1), input_ids[:, 1:].flatten())))
            return super().forward(input_ids, labels)

    monkeypatch.setattr(student, "Student", Watched)
    _, record = tuned(monkeypatch, distill=0.0, sigma=0.0)
    assert record.curves["loss"][0] == pytest.approx(seen[0], rel=1e-3)


def cut_in_step_5(monkeypatch, **changes):
    """Training that ends there; the steps reported so far, and from now on."""
    steps, cut = [], [5]

    def bar(label):
        def report(done, total):
            if label.startswith("training"):
                steps.append(done)
                if [done] == cut:
                    cut.clear()
                    raise Cut

        return report

    monkeypatch.setattr(progress, "bar", bar)
    with pytest.raises(Cut):
        tuned(monkeypatch, "cut", **changes)
    return steps


@pytest.mark.parametrize("changes", [{}, FIXED | {"train": "all", "lr_scales": 0.1}])
def test_training_cut_off_goes_on_to_the_same_bytes(ready, monkeypatch, changes):
    whole = store.hash_tree(tuned(monkeypatch, "whole", **changes)[0])
    steps = cut_in_step_5(monkeypatch, **changes)
    assert store.hash_tree(tuned(monkeypatch, "cut", **changes)[0]) == whole
    assert steps == [1, 2, 3, 4, 5, 5, 6]  # from the checkpoint of step 4


def test_pull_and_noise_are_switches_of_their_own(ready, monkeypatch):
    """Four runs, four results: plain straight-through training, each alone, both."""
    ways = [{"alpha": a, "sigma": s} for a in (0.0, 0.4) for s in (0.0, 1e-2)]
    made = {store.hash_file(tuned(monkeypatch, str(w), **w)[0] / "lagrangian-trained" / "model.safetensors") for w in ways}
    assert len(made) == 4


def test_damping_is_what_it_is_told_of_the_first_gradients_and_for_scales_and_norms_alone(ready, monkeypatch):
    seen, step = [], torch.optim.AdamW.step

    def stepping(self, *args):
        gradients = [torch.cat([p.grad.flatten() for p in g["params"]]) for g in self.param_groups]
        means = [float(g[g != 0].square().mean().sqrt()) for g in gradients]
        seen.append([(g["eps"], mean) for g, mean in zip(self.param_groups, means, strict=True)])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", stepping)
    tuned(monkeypatch, damping=0.5, steps=2, alpha=0.0)
    (weights, _), scales, norms = seen[0]
    assert weights == 1e-8
    for eps, first in (scales, norms):
        assert eps == pytest.approx(0.5 * first, rel=1e-4)
    assert [eps for eps, _ in seen[1]] == [eps for eps, _ in seen[0]]
    seen.clear()
    tuned(monkeypatch, "plain", damping=0.0, steps=1, alpha=0.0)
    assert [eps for eps, _ in seen[0]] == [1e-8] * 3


@pytest.mark.parametrize(("given", "fixed"), [
    ({"steps": 100}, True), ({"steps": student.LONG}, False), ({"steps": 100, "pull_every": 20}, False),
    ({"steps": 100, "sigma": 1e-3}, False), ({"steps": 100, "codes": "learned"}, False),
    ({"steps": student.LONG, "codes": "fixed"}, True), ({"steps": 100, "pull_every": 20, "alpha": 0.0}, True),
])  # fmt: skip
def test_codes_are_fixed_in_short_runs_without_winq(given, fixed):
    config = FinetuneConfig(**given)
    assert config.fixed == fixed
    assert not (config.fixed and ((config.alpha and config.pull_steps) or config.noise))
    assert (config.scales_rate, config.damped) == ((1.5e-2, 1.0) if fixed else (2e-3, 0.0))


def test_pulls_come_every_so_many_steps(ready, monkeypatch):
    pulls = []
    monkeypatch.setattr(qat, "pull_to_grid_", lambda model, alpha, rotated: pulls.append(alpha))
    tuned(monkeypatch, steps=7, pull_every=3, alpha=0.3)
    assert pulls == [0.3, 0.3]
    tuned(monkeypatch, "short", steps=4, pull_every=None, alpha=0.2)
    assert len(pulls) == 2
    monkeypatch.setattr(student, "LONG", 4)
    tuned(monkeypatch, "long", steps=4, pull_every=None, alpha=0.2)
    assert pulls[2:] == [0.2] * 4


def test_a_hadamard_basis_is_asked_for_before_anything_is_trained(ready, monkeypatch):
    """The tiny model's units are 32 columns wide."""
    made = {
        store.hash_tree(tuned(monkeypatch, str(way), hadamard=way, lr=1e-2)[0], "*.safetensors") for way in (False, True)
    }
    assert len(made) == 2
    monkeypatch.setattr(qat, "hadamard", lambda width: exec(f"raise InputError('{width}')", {"InputError": InputError}))
    steps = []
    monkeypatch.setattr(progress, "bar", lambda label: lambda done, total: steps.append(label))
    with pytest.raises(InputError, match="32"):
        tuned(monkeypatch, "refused", hadamard=True)
    assert not [label for label in steps if label.startswith("training")]


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_last_good_checkpoint(ready, monkeypatch):
    steps = []

    class Broken(student.Student):
        def forward(self, input_ids, labels=None):
            out = super().forward(input_ids, labels)
            steps.append(1)
            return {"loss": out["loss"] * float("nan")} if len(steps) == 4 else out

    monkeypatch.setattr(student, "Student", Broken)
    with pytest.raises(UserError, match=r"the loss is nan in step 4; the last good checkpoint is .*checkpoint-2, from"):
        tuned(monkeypatch)


def test_a_gradient_that_is_no_number_stops_the_run_before_it_is_saved(ready, monkeypatch):
    backward = qat._Round.backward
    steps = []

    def broken(ctx, *gradients):
        steps.append(1)
        found = backward(ctx, *gradients)
        return (found[0] * float("nan"), *found[1:]) if len(steps) == 50 else found  # 14 matrices a step: in the fourth

    monkeypatch.setattr(qat._Round, "backward", staticmethod(broken))
    with pytest.raises(UserError, match=r"the gradient is nan in step 4; the last good checkpoint is .*checkpoint-2, from"):
        tuned(monkeypatch)


@pytest.mark.parametrize(
    "lost", ["trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"]
)
def test_a_checkpoint_that_was_cut_off_while_it_was_written_is_passed_over(ready, monkeypatch, lost):
    whole = store.hash_tree(tuned(monkeypatch, "whole")[0])
    steps = cut_in_step_5(monkeypatch)
    (store.state("finetune") / "resume" / "lagrangian" / "checkpoint-4" / lost).unlink()
    steps.clear()
    assert store.hash_tree(tuned(monkeypatch, "cut")[0]) == whole
    assert 3 in steps


def test_no_steps_no_training(ready, monkeypatch):
    out, _ = tuned(monkeypatch, steps=0)
    assert store.load_json(out / "bytes.json") == {} and len(list(out.iterdir())) == 1


def test_a_checkpoint_of_another_plan_is_refused(ready, monkeypatch):
    from tasks.student import build

    student = build(store.path("quantize") / "lagrangian", CONFIG, torch.device("cpu"))
    state = dict(student.state_dict())
    state.pop(next(iter(state)))
    with pytest.raises(UserError, match="is of another plan"):
        student.load_state_dict(state)


def test_training_cut_off_after_its_last_step_is_not_trained_on(ready, monkeypatch):
    """A pull in every step would show."""
    changes = {"steps": 5, "pull_every": 1, "alpha": 0.5, "lr": 1e-2}
    whole = store.hash_tree(tuned(monkeypatch, "whole", **changes)[0])
    with monkeypatch.context() as patched:
        patched.setattr(finetune, "_as_stored_", cut)
        with pytest.raises(Cut):
            tuned(patched, "cut", **changes)
    out, record = tuned(monkeypatch, "cut", **changes)
    assert store.hash_tree(out) == whole and len(record.curves["loss"]) == 5


def cut(model):
    raise Cut


def test_what_another_number_of_processes_began_is_begun_anew(ready, monkeypatch):
    whole = store.hash_tree(tuned(monkeypatch, "whole")[0])
    cut_in_step_5(monkeypatch)
    folder = store.state("finetune") / "resume" / "lagrangian"
    assert sorted(p.name for p in folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    store.save_json(folder / "way.json", {"processes": 3, "device": "cpu"})
    assert store.hash_tree(tuned(monkeypatch, "cut")[0]) == whole and not (folder / "checkpoint-2").exists()


def test_a_checkpoint_without_every_processs_random_numbers_is_passed_over(tmp_path):
    from tasks.training import PARTS, STATE, last

    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / STATE).write_text("{}")
        for name in (*PARTS, "rng_state_0.pth", *["rng_state_1.pth"] * (step == 2)):
            (folder / name).touch()
    assert last(tmp_path, 2) == str(tmp_path / "checkpoint-2") and not (tmp_path / "checkpoint-4").exists()


def test_two_processes_go_the_way_of_one(ready, monkeypatch):
    """They split the same windows of every step, and average; noise has the same seeds in both. Products in bfloat16, which
    has 8 bits, are rounded differently for one window and for two."""
    monkeypatch.setenv("PYTHONPATH", str(Path(finetune.__file__).parents[1]))
    _, one = tuned(monkeypatch, "one", steps=4, batch=2, eval_every=2)
    out, two = tuned(monkeypatch, "two", steps=4, batch=1, eval_every=2, processes=2)
    for name in ("loss", "validation_nll"):
        assert two.curves[name] == pytest.approx(one.curves[name], rel=1e-2, nan_ok=True)
    assert two.metrics["nll_after"] == pytest.approx(two.curves["validation_nll"][-1], rel=1e-3)
    assert checkpoint.count(out / "lagrangian-trained").effective_bits == two.metrics["effective_bits"]


def test_a_stop_in_several_processes_keeps_the_checkpoint_it_names(ready, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(finetune.__file__).parents[1]))
    with pytest.raises(UserError, match="the last good checkpoint is .*, from which") as raised:
        tuned(monkeypatch, lr_norms=1e30, warmup=0.9, steps=10, save_every=1, processes=2)
    named = Path(str(raised.value).partition("checkpoint is ")[2].partition(", from")[0])
    assert (named / "rng_state_1.pth").exists()


def test_torchrun_is_ended_with_a_stage_that_is_killed():
    script = (
        "import subprocess, time; from tasks.processes import _die_with_parent as die;"
        "print(subprocess.Popen(['sleep', '99'], preexec_fn=die).pid, flush=True); time.sleep(99)"
    )
    root = Path(finetune.__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root) as stage:
        child = psutil.Process(int(stage.stdout.readline()))
        stage.kill()
    child.wait(10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_what_stops_one_of_several_processes_is_said_in_a_sentence(ready, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(Path(finetune.__file__).parents[1]))
    sentence = "the (loss|gradient) is (nan|inf) in step .*no checkpoint was saved before"
    with pytest.raises(UserError, match=sentence):
        tuned(monkeypatch, lr_norms=1e30, warmup=0.0, save_every=50, processes=2)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_text_that_the_reference_makes_up_is_the_same_for_a_seed_and_another_for_another(ready, tmp_path):
    model = models.reference(store.path("prepare") / "model", torch.device("cpu"))
    texts = [generate.windows(model, 3, 12, seed, store.Memory(), lambda done, total: None) for seed in (0, 0, 1)]
    assert texts[0].shape == (3, 12) and torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    logits = model(input_ids=texts[0]).logits
    likeliest = logits[:, : generate.LIKELIEST].argmax(-1)
    assert torch.equal(texts[0][:, 1 : 1 + generate.LIKELIEST], likeliest)
    assert not torch.equal(texts[0][:, 2 + generate.LIKELIEST :], logits[:, 1 + generate.LIKELIEST : -1].argmax(-1))


def test_generated_text_can_be_trained_on(ready, monkeypatch):
    _, record = tuned(monkeypatch, steps=2, text="generated")
    assert len(record.curves["loss"]) == 2


@pytest.mark.parametrize(("given", "sentence"), [
    ({"steps": -1}, "steps -1 is negative"), ({"lr": 0.0}, "lr 0 is not above 0"), ({"alpha": 1.5}, "alpha 1.5 is not between"),
    ({"sigma": -0.1}, "sigma -0.1 is negative"), ({"distill": 2.0}, "distill 2 is not"), ({"windows": 0}, "windows 0 is not"),
    ({"damping": -1.0}, "damping -1 is negative"), ({"codes": "fixed", "sigma": 1e-3}, "leaves pull_every, sigma and hadamard"),
    ({"lr_scales": 0.0}, "lr_scales 0 is not above 0"), ({"codes": "fixed", "hadamard": True}, "nothing to do"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        FinetuneConfig(**given)


def test_the_stage_can_be_run_again_beside_its_earlier_result(ready, monkeypatch):
    shutil.copytree(tuned(monkeypatch)[0], store.path("finetune"))
    assert store.hash_tree(tuned(monkeypatch, "again")[0]) == store.hash_tree(store.path("finetune"))
