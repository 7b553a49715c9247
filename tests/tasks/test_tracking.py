import pytest

from tasks import tracking
from tasks.job import Record


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv(tracking.PARENT, raising=False)
    return tmp_path


pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own


def status(run_id):
    return tracking.client()[0].get_run(run_id).info.status


def test_a_run_keeps_what_it_was_told_and_drops_what_would_break_its_page(home):
    picture = home / "a.txt"
    picture.write_text("x")
    with tracking.run("quantize", {"stage": "quantize"}) as opened:
        opened.log(Record({"bits": 2.25, "bad": float("nan")}, {"k": "v" * 9000}, files=[picture],
                          tables={"t": {"c": [1, 2]}}, children={"uniform": Record({"bits": 2.0})}))  # fmt: skip
    api, _ = tracking.client()
    found = api.get_run(opened.id)
    assert found.data.metrics == {"bits": 2.25} and len(found.data.params["k"]) == 6000
    assert found.info.status == "FINISHED" and found.data.tags["kind"] == "measured"
    assert {f.path for f in api.list_artifacts(opened.id)} >= {"a.txt", "t.json", "t.parquet"}
    assert tracking.children_of(opened.id) == {"uniform": {"bits": 2.0}}
    assert (home / "mlruns" / "mlflow.db").exists()


def test_curves_are_kept_step_by_step(home):
    with tracking.run("allocate", {}) as opened:
        opened.log(Record(curves={"loss": [3.0, float("inf"), 2.0], "long": [0.5] * 150}))
    api, _ = tracking.client()
    assert [(m.step, m.value) for m in api.get_metric_history(opened.id, "loss")] == [(0, 3.0), (2, 2.0)]
    assert len(api.get_metric_history(opened.id, "long")) == 150


def test_published_runs_are_made_once_and_say_so(home):
    published = {"LLaMA-3-1B WINDQuant 2.01": Record({"perplexity": 19.64}, tags={"source": "arXiv 2605.26660"})}
    for _ in range(2):
        with tracking.run("compare", {}) as opened:
            opened.log(Record(published=published))
    api, experiment = tracking.client()
    (found,) = api.search_runs([experiment], "tags.kind = 'published'")
    assert found.data.metrics == {"perplexity": 19.64} and found.data.tags["source"] == "arXiv 2605.26660"
    assert found.info.status == "FINISHED" and tracking.children_of(opened.id) == {}


def test_a_failed_run_stays_as_failed_with_its_log(home):
    log = home / "log.txt"
    log.write_text("what happened")
    with pytest.raises(RuntimeError), tracking.run("calibrate", {}, log) as opened:
        raise RuntimeError
    assert status(opened.id) == "FAILED"
    assert [f.path for f in tracking.client()[0].list_artifacts(opened.id)] == ["log.txt"]


def test_an_interrupted_run_is_killed(home):
    with pytest.raises(KeyboardInterrupt), tracking.run("calibrate", {}) as opened:
        raise KeyboardInterrupt
    assert status(opened.id) == "KILLED"


def test_a_stage_nests_in_the_pipelines_run(home, monkeypatch):
    with tracking.run("pipeline", {}) as parent:
        monkeypatch.setenv(tracking.PARENT, parent.id)
        with tracking.run("calibrate", {}) as child:
            pass
    assert list(tracking.children_of(parent.id)) == ["calibrate"] and child.id != parent.id


def test_a_run_whose_process_died_is_marked_on_the_next_start(home):
    api, experiment = tracking.client()
    dead = tracking._create(api, experiment, "x", None, {**tracking._process(), "pid": "999999999"})
    alive = tracking._create(api, experiment, "y", None, tracking._process())
    with tracking.run("z", {}):
        pass
    assert (status(dead), status(alive)) == ("KILLED", "RUNNING")


def test_a_run_that_ended_since_it_was_found_running_stays_as_it_ended(home, monkeypatch):
    api, experiment = tracking.client()
    ending = tracking._create(api, experiment, "x", None, tracking._process())

    def alive(pid, born):
        api.set_terminated(ending, "FINISHED")
        return False

    monkeypatch.setattr(tracking, "_alive", alive)
    tracking.mark_killed(api, experiment)
    assert status(ending) == "FINISHED"
