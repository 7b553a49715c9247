"""The Prefect task around DVC, against a stand-in for DVC that says what DVC says."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tasks.stages import Piece

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


MATRIX = """
import pathlib, sys, time
if "repro" not in sys.argv:
    sys.exit()
target = sys.argv[-1].rpartition("@")[2]
pathlib.Path(target).touch()
if target in ("a-2", "b-2"):  # each waits for the other
    end = time.time() + 60
    while not (pathlib.Path("a-2").exists() and pathlib.Path("b-2").exists()):
        if time.time() > end:
            pathlib.Path("one by one").touch()
            break
        time.sleep(0.05)
if target == "b-2" and not pathlib.Path("again").exists():
    pathlib.Path("again").touch()
    sys.exit("ERROR: failed to run: python -m tasks baselines b-2, exited with 1")
if target == "c-2":
    print("baselines-c-2: no such method\\nERROR: failed to run: python -m tasks baselines c-2, exited with 2")
    sys.exit(255)
print("Running stage", flush=True)
if target == "hangs-2":
    pathlib.Path("pid").write_text(str(__import__("os").getpid()))
    time.sleep(600)
"""


def test_variants_run_side_by_side_and_one_that_fails_is_tried_again_and_does_not_stop_the_others(
    prefect_server, tmp_path, monkeypatch
):
    from prefect import flow

    from flows import pipeline
    from tasks import stage, store

    monkeypatch.chdir(tmp_path)
    Path("fake.py").write_text(MATRIX)
    monkeypatch.setattr(stage, "DVC", (sys.executable, "fake.py"))
    group = [Piece("baselines", f"{method}-2") for method in "abcd"]
    for piece in group:
        store.save_json(store.failure(piece.key), {})
    states = flow(lambda: pipeline._variants(group, 2, dict(os.environ)))()
    assert not Path("one by one").exists()
    assert [states[p] for p in group] == ["Executed", "Executed", "Failed", "Executed"]
    assert [store.failure(p.key).exists() for p in group] == [False, False, True, False]


def test_a_stage_that_fails_ends_the_pipeline(monkeypatch):
    from prefect.states import Failed

    from flows import pipeline
    from tasks.errors import UserError

    monkeypatch.setattr(pipeline, "run_stage", lambda *a, **k: Failed(message="why", name="BadInput"))
    with pytest.raises(UserError, match="why"):
        pipeline._run(Piece("benchmark"), {})


INTERRUPTED = """
import os, sys
sys.path.insert(0, "{root}")
from flows import pipeline
from prefect import flow
from tasks import interrupts, stage
from tasks.stages import Piece

stage.DVC = (sys.executable, "fake.py")
interrupts.listen(pipeline.signal.SIGINT)
try:
    flow(lambda: pipeline._variants([Piece("baselines", n) for n in ("hangs-2", "d-2", "hangs-2")], 1, dict(os.environ)))()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_an_interrupt_stops_what_runs_side_by_side(prefect_server, tmp_path):
    from prefect.settings import PREFECT_API_URL

    (tmp_path / "fake.py").write_text(MATRIX)
    script = INTERRUPTED.format(root=Path(__file__).resolve().parents[2])
    known = os.environ | {"PREFECT_API_URL": PREFECT_API_URL.value()}
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, env=known, stdout=subprocess.PIPE, text=True
    ) as flow:
        while not (tmp_path / "pid").exists():
            assert flow.poll() is None
            time.sleep(0.1)
        flow.send_signal(signal.SIGINT)
        said, _ = flow.communicate(timeout=60)
    assert said.endswith("interrupted\n") and flow.returncode == 0
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text())) and not (tmp_path / "d-2").exists()
