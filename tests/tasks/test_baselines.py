"""The baselines stage on the tiny model, and what compare makes of its results."""

import os
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tasks import __main__ as entry
from tasks import baselines, measure, peers, settings, signround, store, tables, trained
from tasks.baselines import BaselinesConfig
from tasks.config import Common
from tasks.errors import UserError
from tasks.job import Job
from tasks.measure import BenchmarkConfig
from tasks.stages import Piece, pieces
from tests.conftest import article
from tests.tasks.test_resume import prepared  # noqa: F401
from windquant.baselines.affine import round_to_nearest
from windquant.errors import InputError

CONFIG = BaselinesConfig(group=32, train_steps=3)
SETTINGS, VARIANTS = CONFIG.settings(0), ["rtn-2", "gptq-3", "gptq-2", "awq-2"]
EVALUATION = BenchmarkConfig(tasks=("last_word",), windows=2, limit=2)
pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's own


@pytest.fixture
def ready(prepared):  # noqa: F811
    folder = store.path("prepare")
    ids = torch.randint(300, (2, 30), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    store.save_tensors(folder / "windows" / "test.safetensors", {"ids": ids})
    store.save_table(folder / "text" / "test.parquet", {"text": [article(1), article(2)]}, {})
    manifest = store.load_json(folder / "manifest.json")
    manifest |= {"windows_hash": "2", "bos": False, "eval_stride": 30, "windows": {"test": [2, 30]}}
    store.save_json(folder / "manifest.json", manifest)


def run(variant, config=CONFIG, evaluation=EVALUATION):
    """As the entry point runs it; gives the record."""
    key = Piece("baselines", variant).key
    out = store.state(key) / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    job = Job("baselines", Common(), out, store.Scratch(key, "x"), variant=variant, section=lambda name: evaluation)
    record = baselines.run(config, job)
    store.path(key).parent.mkdir(exist_ok=True)
    out.rename(store.path(key))
    store.save_json(store.run_record(key), {"mlflow_run": "0"} | record.extra)
    return record


def facts():
    hashes = {"model_hash": "0", "text_hash": "1", "windows_hash": "2"}
    manifest = store.load_json(store.path("prepare") / "manifest.json")
    return measure.facts(EVALUATION, manifest, ["last_word"]) | hashes


@pytest.mark.parametrize("variant", ["rtn-2", "hqq-3", "gptq-4", "awq-2", "paretoq-2", "llm-qat-1"])
def test_a_variant_has_benchmarks_keys_and_the_bytes_that_lie_on_the_disk(ready, variant):
    record = run(variant)
    row = store.load_json(store.path("baselines") / variant / "results.json")
    assert {
        "perplexity",
        "nll",
        "kl_to_reference",
        "acc_mean",
        "acc/last_word",
        "effective_bits",
        "model_bytes",
    } <= row.keys()
    assert row["kind"] == "measured" and record.metrics["perplexity"] == row["perplexity"] and record.extra["seconds"] > 0
    files = sorted((store.path("baselines") / variant).glob("*.safetensors"))
    tensors = {n: t for f in files for n, t in store.load_tensors(f).items()}
    weights = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    own = sum(t.nbytes for n, t in tensors.items() if "norm" not in n)
    assert row["effective_bits"] == 8 * own / weights
    other = 2 * (300 * 64 + 5 * 64)  # the embedding and the norms, in float16
    headers = sum(f.stat().st_size for f in files) - sum(t.nbytes for t in tensors.values())
    assert row["model_bytes"] == own + other + headers


def test_what_is_measured_was_loaded_from_the_files(ready, monkeypatch):
    seen = {}

    def measured(name, model, reference, config, manifest):
        seen["w"] = model.model.layers[1].mlp.up_proj.weight
        return {"perplexity": 1.0, "acc_mean": 0.0}

    monkeypatch.setattr(measure, "measure", measured)
    run("rtn-3")
    original = store.load_tensors(store.path("prepare") / "model" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(seen["w"], round_to_nearest(original, 3, 32).dequantize())


def made_by(variant, monkeypatch, **changes):
    """The tensors that training leaves with other settings."""
    own = trained.settings
    monkeypatch.setattr(trained, "settings", lambda method, steps: replace(own(method, steps), lr=1e-2, **changes))
    job = Job("baselines", Common(), store.Path("out"), store.Scratch("made", str(changes)), variant=variant)
    made = list(trained.quantize(*variant.rsplit("-", 1)[:1], 2, 32, 4, job))
    monkeypatch.setattr(trained, "settings", own)
    return [t for block in made for matrix in block.values() for t in matrix.tensors().values()]


def test_paretoq_is_winq_without_pull_and_noise(ready, monkeypatch):
    plain, same, pulled, noisy = (
        made_by("paretoq-2", monkeypatch, **changes)
        for changes in ({}, {"alpha": 0.0, "pull_every": 1}, {"alpha": 0.9, "pull_every": 1}, {"sigma": 0.05})
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    for other in (pulled, noisy):
        assert not all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_llm_qat_learns_from_what_the_reference_makes_up_and_from_nothing_else(ready, monkeypatch):
    made = made_by("llm-qat-2", monkeypatch)
    windows = store.path("prepare") / "windows" / "train.safetensors"
    ids = store.load_tensors(windows)["ids"]
    store.save_tensors(windows, {"ids": ids.flip(1)})
    assert all(torch.equal(a, b) for a, b in zip(made, made_by("llm-qat-2", monkeypatch, sigma=0.0), strict=True))


def test_a_width_that_a_method_does_not_admit_makes_a_row_that_says_so(ready):
    run("gptq-8")
    found = peers.load(facts(), SETTINGS, VARIANTS)
    assert (found.rows, found.missing) == ([], {"gptq-8": "gptq is for 2, 3, 4 bits, not 8"})


def test_rows_of_other_text_or_tasks_are_not_set_beside_ours(ready):
    run("rtn-2")
    assert [r["variant"] for r in peers.load(facts(), SETTINGS, VARIANTS).rows] == ["rtn-2"]
    found = peers.load(facts() | {"limit": 3}, SETTINGS, [])
    assert found.rows == [] and "measured before limit changed; `make baselines` measures it again" in found.missing["rtn-2"]


def test_rows_that_were_made_otherwise_are_not_set_beside_each_other(ready):
    run("rtn-2")
    other = replace(CONFIG, group=16).settings(0)
    found = peers.load(facts(), other, VARIANTS)
    assert found.rows == [] and found.missing["rtn-2"] == "made with another group; `make baselines` makes it again"
    assert "another seed" in peers.load(facts(), CONFIG.settings(1), VARIANTS).missing["rtn-2"]


@pytest.mark.parametrize("variant", ["rtn", "rtn-x", "rtn-1.58", "best-2", ""])
def test_what_is_no_variant_is_refused(ready, variant):
    with pytest.raises(UserError, match=f"'{variant}' is no baseline: <method>-<bits>"):
        run(variant)


def fail(monkeypatch, raised):
    def run(piece, log_file):
        raise raised

    monkeypatch.setattr(entry, "_logging", lambda name, file: None)
    monkeypatch.setattr(entry.signal, "signal", lambda *a: None)
    monkeypatch.setattr(entry, "_run", run)
    return entry.main(["baselines", "rtn-2"])


@pytest.mark.parametrize(
    ("raised", "code", "reason"),
    [(UserError("not installed; pip install it"), 2, "failed: not installed; pip install it"),
     (RuntimeError("singular\nmatrix"), 1, "failed: RuntimeError: singular")],
)  # fmt: skip
def test_a_method_that_fails_is_listed_with_the_reason_whatever_it_left_before(ready, monkeypatch, raised, code, reason):
    run("rtn-2")
    assert fail(monkeypatch, raised) == code
    found = peers.load(facts(), SETTINGS, VARIANTS)
    assert (found.rows, found.missing) == ([], {"rtn-2": reason})
    assert store.run_record("baselines/rtn-2").parent.is_dir()  # which DVC asks for, for compare


def test_an_interrupted_method_has_not_failed(ready, monkeypatch):
    assert fail(monkeypatch, KeyboardInterrupt()) == 130
    assert peers.load(facts(), SETTINGS, VARIANTS).missing == {}


def test_a_missing_library_is_told_in_a_sentence(ready, monkeypatch):
    monkeypatch.setitem(sys.modules, "auto_round", None)
    with pytest.raises(UserError, match=r"auto-round is not installed; pip install -c constraints.txt -e '.\[baselines\]'"):
        run("signround-2")


def rounded_layer(columns=64):
    w = torch.randn(8, columns, generator=torch.Generator().manual_seed(0))
    stored = round_to_nearest(w, 2, 32)
    zero = stored.zero.float()
    return stored, SimpleNamespace(weight=stored.dequantize(), scale=stored.scale.float(), zp=zero)


def test_auto_rounds_layers_are_read_back_as_codes_that_give_its_weights():
    stored, layer = rounded_layer()
    assert torch.equal(signround._matrix(layer, "x", 2, 32).dequantize(), stored.dequantize())


def test_auto_rounds_layers_whose_scales_do_not_belong_to_them_are_refused():
    _, layer = rounded_layer()
    layer.scale = layer.scale * 1.5
    with pytest.raises(InputError, match="x: auto-round's scales and zero points do not give its weights"):
        signround._matrix(layer, "x", 2, 32)


def test_auto_rounds_own_result_is_read_back(ready):
    pytest.importorskip("auto_round")
    record = run("signround-2", replace(CONFIG, learn_steps=2, learn_tokens=24))
    assert record.metrics["effective_bits"] == 2 + (16 + 2) / 32 and record.metrics["perplexity"] > 0


def test_the_pieces_are_the_stages_and_all_variants_in_order():
    found = [p.name for p in pieces(BaselinesConfig(methods=("rtn", "awq"), bits=(2, 3)).variants)]
    assert found[-6:] == ["benchmark", "baselines-rtn-2", "baselines-awq-2", "baselines-rtn-3", "baselines-awq-3", "compare"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"methods": ["rtn", "best"]}, "methods has 'best', which is not one of rtn, hqq, gptq, awq, signround"),
        ({"methods": []}, "methods is empty or names one twice"),
        ({"bits": [2, 2]}, "bits is empty or names one twice"),
        ({"bits": [9]}, r"bits \[9\] are not all between 1 and 8"),
        ({"group": 0}, "group 0 is not above 0"),
    ],
)
def test_bad_params_are_refused_by_name(values, message):
    with pytest.raises(UserError, match=message):
        settings.parse({"baselines": values})


def test_params_that_are_changed_for_a_while_come_back_and_others_edits_stay(tmp_path):
    file = tmp_path / "params.yaml"
    text = "baselines:\n  methods: [rtn]   # why\n  bits: [2]\ncompare:\n  dpi: 120\n"
    file.write_text(text)
    with settings.temporarily("baselines", {"methods": ["rtn", "awq"], "bits": [2, 3]}, file):
        assert settings.load(file).baselines.variants == ["rtn-2", "awq-2", "rtn-3", "awq-3"]
    assert file.read_text() == text
    with settings.temporarily("baselines", {"bits": [2, 3]}, file):
        file.write_text(file.read_text().replace("120", "90"))
    assert settings.load(file).compare.dpi == 90 and settings.load(file).baselines.variants == ["rtn-2"]


@pytest.mark.parametrize("text", ["baselines:\ncompare:\n  dpi: 120\n", "compare:\n  dpi: 120\n", ""])
def test_params_that_the_file_leaves_out_come_and_go(tmp_path, text):
    file = tmp_path / "params.yaml"
    file.write_text(text)
    with settings.temporarily("baselines", {"bits": [2, 3]}, file):
        assert settings.load(file).baselines.bits == (2, 3)
        file.write_text(file.read_text() + "common:\n  seed: 7\n")
    assert settings.load(file).common.seed == 7 and settings.load(file).baselines.bits == (2,)


def test_params_changed_by_a_process_that_died_come_back_with_the_next_run(tmp_path):
    file = tmp_path / "params.yaml"
    file.write_text("baselines:\n  bits: [2]\n")
    if (child := os.fork()) == 0:
        entered = settings.temporarily("baselines", {"bits": [2, 3]}, file)
        entered.__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    assert settings.load(file).baselines.bits == (2, 3)
    with settings.temporarily("baselines", {}, file):
        assert file.read_text() == "baselines:\n  bits: [2]\n"


def test_two_runs_do_not_change_params_at_once(tmp_path):
    file = tmp_path / "params.yaml"
    file.write_text("baselines:\n  bits: [2]\n")
    with settings.temporarily("baselines", {"bits": [2, 3]}, file):
        sentence = "is changed for a while by another run of all baselines; wait for its end"
        with pytest.raises(UserError, match=sentence), settings.temporarily("baselines", {"bits": [4]}, file):
            pass
        with settings.temporarily("baselines", {}, file):
            assert settings.load(file).baselines.bits == (2, 3)
    assert settings.load(file).baselines.bits == (2,)


def row(method, bits, perplexity, accuracy=0.3):
    return {"method": method, "effective bits": bits, "model MB": 80.0, "perplexity": perplexity, "KL": 1.0,
            "accuracy": accuracy, "hours": 0.5, "peak GiB": 2.0, "baseline": "-" in method}  # fmt: skip


def test_the_best_of_every_range_of_bits_is_bold():
    rows = [row("reference", 16.0, 20.0), row("lagrangian", 1.9998, 45.0), row("hqq-2", 2.5, 1e6, 0.4),
            row("hqq-3", 3.5, 170.0), row("rtn-3", 3.297, 60.0)]  # fmt: skip
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in tables.comparison(rows).splitlines()[2:]]
    assert [c[0] for c in cells] == ["reference", "lagrangian", "hqq-2", "rtn-3", "hqq-3"]
    assert [c[3] for c in cells] == ["20.00", "**45.00**", "1e+06", "**60.00**", "170.00"]
    assert [c[5] for c in cells] == ["0.300", "0.300", "**0.400**", "**0.300**", "**0.300**"]


def test_variants_share_the_threads_evenly_also_where_one_runs_by_itself(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def threads(piece, threads=0, **baselines):
        return entry._threads(piece, settings.parse({"common": {"threads": threads}, "baselines": baselines}))

    variant = Piece("baselines", "rtn-2")
    assert (threads(variant), threads(variant, at_once=4), threads(variant, at_once=99)) == (4, 2, 1)
    assert (threads(variant, 1), threads(variant, 6), threads(Piece("benchmark"), 6), threads(Piece("benchmark"))) == (
        1,
        3,
        6,
        8,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert BaselinesConfig().workers(Common()) == 1 and BaselinesConfig().workers(Common(device="cpu")) == 2
