import math

import pytest

from tasks import diagnose, store
from tasks.diagnose import DiagnoseConfig
from tests.tasks.test_finetune import ready, tuned  # noqa: F401
from tests.tasks.test_resume import STAGES, prepared, run  # noqa: F401

CONFIG = DiagnoseConfig(probes=2, steps=4, windows=1, tokens=16)
pytestmark = pytest.mark.filterwarnings("ignore")  # Trainer's own


@pytest.fixture
def diagnosed(ready, monkeypatch):  # noqa: F811
    out, _ = tuned(monkeypatch)
    out.rename(store.path("finetune"))

    def once(**changes):
        records = []
        config = DiagnoseConfig(**(vars(CONFIG) | changes))
        monkeypatch.setitem(STAGES, "diagnose", (lambda c, job: records.append(diagnose.run(c, job)), config))
        return run("diagnose"), records[0]

    return once


def test_every_model_has_its_figures_with_their_spread_and_its_curve(diagnosed):
    out, record = diagnosed()
    rows = {r["model"]: r for r in store.load_json(out / "hessian.json")}
    checkpoints = [f"lagrangian-{name}" for name in ("trained", "latent", "pulled")]
    assert list(rows) == ["reference", "lagrangian", "uniform", *checkpoints]
    for row in rows.values():
        names = ("lambda_max", "lambda_min", "trace", "rms", "near_zero", "negative")
        assert all(math.isfinite(row[n]) and math.isfinite(row[f"{n}_std"]) for n in names)
        assert row["lambda_max"] >= row["lambda_min"] and 0 <= row["near_zero"] + row["negative"] <= 1
    assert rows["reference"]["trace"] != rows["lagrangian"]["trace"]
    assert record.metrics["lambda_max/reference"] == rows["reference"]["lambda_max"]
    assert rows["lagrangian"]["bits"] == rows["lagrangian-pulled"]["bits"] < 3 < rows["reference"]["bits"] == 16
    assert len({row["trace"] for row in rows.values()}) == 6
    assert record.files == [out / "bits.png", out / "density.png"]
    assert all(f.read_bytes().startswith(b"\x89PNG") and f.stat().st_size > 1000 for f in record.files)


def test_a_whole_pull_ends_at_the_checkpoint(diagnosed):
    rows = {r["model"]: r for r in store.load_json(diagnosed(alpha=1.0)[0] / "hessian.json")}
    for name in ("lambda_max", "lambda_min", "trace"):
        assert rows["lagrangian-pulled"][name] == pytest.approx(rows["lagrangian"][name], rel=1e-5)
        assert rows["lagrangian-latent"][name] != pytest.approx(rows["lagrangian"][name], rel=1e-3)


def test_without_a_pull_the_latent_weights_are_where_training_starts(diagnosed):
    rows = {r["model"]: r for r in store.load_json(diagnosed(alpha=0.0)[0] / "hessian.json")}
    assert rows["lagrangian-pulled"]["trace"] == rows["lagrangian-latent"]["trace"]


def test_no_probes_no_diagnostics(diagnosed):
    out, _ = diagnosed(probes=0)
    assert store.load_json(out / "hessian.json") == [] and len(list(out.iterdir())) == 1


@pytest.mark.parametrize(("given", "sentence"), [
    ({"probes": -1}, "probes -1 is negative"), ({"steps": 0}, "steps 0 is not above 0"), ({"block": -2}, "block -2 is"),
    ({"alpha": 1.5}, "alpha 1.5"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        DiagnoseConfig(**given)
