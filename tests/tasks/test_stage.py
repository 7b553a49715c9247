"""The Prefect task around DVC, against a stand-in for DVC that says what DVC says."""

import os
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # Prefect's own

FAKE = """
import pathlib, sys
verb = [a for a in sys.argv[1:] if not a.startswith("--")][0]
log = pathlib.Path("calls")
log.write_text((log.read_text() if log.exists() else "") + verb + "\\n")
script = pathlib.Path("script").read_text().split("|")
turn = log.read_text().split().count("repro") - 1
if verb == "repro":
    code, _, text = script[min(turn, len(script) - 1)].partition(" ")
    print(text)
    sys.exit(int(code))
"""


@pytest.fixture(scope="module")
def prefect_server():
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture
def run(prefect_server, tmp_path, monkeypatch):
    """Run the task on what DVC would say and exit with, turn by turn; gives the final state and DVC's verbs."""
    from prefect import flow

    from tasks import stage

    monkeypatch.chdir(tmp_path)
    Path("fake.py").write_text(FAKE)
    monkeypatch.setattr(stage, "DVC", (sys.executable, "fake.py"))

    def go(script):
        Path("script").write_text(script)
        ended = []

        @flow
        def one():
            task = stage.run_stage.with_options(retry_delay_seconds=0)
            ended.append(task("calibrate", dict(os.environ), "calibrate", return_state=True))

        one()
        return ended[0], Path("calls").read_text().split()

    return go


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("Running stage 'calibrate':", "Executed"),
        ("Stage 'calibrate' didn't change, skipping", "Cached"),
        ("Stage 'calibrate' is cached - skipping run, checking out outputs", "Restored"),
    ],
)
def test_the_state_is_named_for_what_dvc_did(run, said, name):
    state, calls = run(f"0 {said}")
    assert (state.name, calls) == (name, ["repro"])


def test_a_failure_is_retried(run):
    state, calls = run("255 ERROR: failed to run: python -m tasks calibrate, exited with 1|0 Running stage 'calibrate':")
    assert state.name == "Executed" and calls.count("repro") == 2


def test_a_lasting_failure_is_tried_three_times_and_brings_the_earlier_result_back(run):
    state, calls = run("255 ERROR: failed to run: python -m tasks calibrate, exited with 1")
    assert state.is_failed() and calls == ["repro", "checkout"] * 3


def test_only_the_code_of_bad_input_counts_as_bad_input(run):
    state, calls = run("255 ERROR: failed to run: python -m tasks calibrate, exited with 255")
    assert state.name != "BadInput" and calls.count("repro") == 3


def test_what_the_user_must_mend_is_not_retried_and_says_so(run):
    state, calls = run(
        "255 calibrate: the text is too short\nERROR: failed to run: python -m tasks calibrate, exited with 2"
    )
    assert (state.name, calls) == ("BadInput", ["repro", "checkout"])
    assert state.message == "calibrate: the text is too short"


def test_a_baseline_that_fails_does_not_stop_the_others_and_any_other_stage_does(tmp_path, monkeypatch):
    from prefect.states import Completed, Failed

    from flows import pipeline
    from tasks import store
    from tasks.errors import UserError
    from tasks.stages import Piece

    monkeypatch.chdir(tmp_path)
    baseline, ended = Piece("baselines", "rtn-2"), Failed(message="why", name="BadInput")
    monkeypatch.setattr(pipeline, "run_stage", lambda *a, **k: ended)
    assert pipeline._run(baseline, {}) == "Failed"
    with pytest.raises(UserError, match="why"):
        pipeline._run(Piece("benchmark"), {})
    store.save_json(store.failure(baseline.key), {})
    ended = Completed(name="Restored")
    assert pipeline._run(baseline, {}) == "Restored" and not store.failure(baseline.key).exists()
