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
    if "exited with" in text:  # which DVC says to stderr, where on a terminal nobody reads it
        pathlib.Path(".state/calibrate").mkdir(parents=True, exist_ok=True)
        pathlib.Path(".state/calibrate/exit").write_text(text.rpartition(" ")[2])
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
            ended.append(task(Piece("calibrate"), dict(os.environ), return_state=True))

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


@pytest.mark.parametrize(("code", "name"), [(2, "BadInput"), (3, "NoRoom")])
def test_what_the_user_must_mend_is_not_retried_and_says_so(run, code, name):
    state, calls = run(f"255 calibrate: the text is too short\nERROR: failed to run: python, exited with {code}")
    assert (state.name, calls) == (name, ["repro", "checkout"])
    assert state.message == "calibrate: the text is too short"


def test_an_earlier_runs_exit_code_is_not_taken_for_this_ones(run):
    Piece("calibrate").exit_code.parent.mkdir(parents=True)
    Piece("calibrate").exit_code.write_text("2")
    state, calls = run("255 ERROR: the stage did not begin")
    assert state.name == "Failed" and calls.count("repro") == 3


MATRIX = """
import os, pathlib, sys, time
target = sys.argv[-1].rpartition("@")[2]
if "repro" not in sys.argv:
    with open("restored", "a") as f:
        print(target, file=f)
    sys.exit()
pathlib.Path(target).touch()
with open("begun", "a") as f:
    print(target, file=f)
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
code = {"c-2": 2, "full-2": 3}.get(target)
again = pathlib.Path(f"{target} again")
if code == 2 or (code and not again.exists()):
    again.touch()
    folder = pathlib.Path(f".state/baselines/{target}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "exit").write_text(str(code))
    sys.exit(255)
print("Running stage", flush=True)
if target.startswith("hangs"):
    pathlib.Path(f"{target}.pid").write_text(str(os.getpid()))
    time.sleep(600)
"""


def test_variants_run_side_by_side_and_one_that_fails_is_tried_again_and_does_not_stop_the_others(
    prefect_server, tmp_path, monkeypatch
):
    """b fails once, c because of the user, full for want of memory beside another."""
    from prefect import flow

    from flows import pipeline
    from tasks import stage, store

    monkeypatch.chdir(tmp_path)
    Path("fake.py").write_text(MATRIX)
    monkeypatch.setattr(stage, "DVC", (sys.executable, "fake.py"))
    group = [Piece("baselines", f"{method}-2") for method in ("a", "b", "c", "full")]
    for piece in group:
        store.save_json(store.failure(piece.key), {})
    states = flow(lambda: pipeline._variants(group, 2, dict(os.environ)))()
    assert not Path("one by one").exists()
    assert sorted(Path("begun").read_text().split()) == ["a-2", "b-2", "b-2", "c-2", "full-2", "full-2"]
    assert [states[p] for p in group] == ["Executed", "Executed", "Failed", "Executed"]
    assert [store.failure(p.key).exists() for p in group] == [False, False, True, False]


def test_a_stage_that_fails_ends_the_pipeline(monkeypatch):
    from prefect.states import Failed

    from flows import pipeline
    from tasks.errors import UserError

    monkeypatch.setattr(pipeline, "run_stage", lambda *a, **k: Failed(message="why", name="BadInput"))
    with pytest.raises(UserError, match="why"):
        pipeline._run(Piece("benchmark"), {})


STOPPED = """
import os, sys
sys.path.insert(0, "{root}")
from flows import pipeline
from prefect import flow
from tasks import interrupts, stage
from tasks.stages import Piece

class Other(BaseException):
    "What Prefect raises where a flow is cancelled."

def stop(number, frame):
    raise Other

stage.DVC = (sys.executable, "fake.py")
interrupts.listen(pipeline.signal.SIGINT)
pipeline.signal.signal(pipeline.signal.SIGTERM, stop)
group = [Piece("baselines", n) for n in ("hangs-2", "hangs-3", "d-2", "e-2")]
try:
    flow(lambda: pipeline._variants(group, 2, dict(os.environ)))()
except (KeyboardInterrupt, Other) as e:
    print(type(e).__name__, flush=True)
"""


@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "Interrupted"), (signal.SIGTERM, "Other")])
def test_what_stops_the_flow_stops_all_that_runs_side_by_side_and_begins_nothing(prefect_server, tmp_path, number, said):
    from prefect.settings import PREFECT_API_URL

    (tmp_path / "fake.py").write_text(MATRIX)
    script = STOPPED.format(root=Path(__file__).resolve().parents[2])
    known = os.environ | {"PREFECT_API_URL": PREFECT_API_URL.value()}
    pids = [tmp_path / f"hangs-{n}.pid" for n in (2, 3)]
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=tmp_path, env=known, stdout=subprocess.PIPE, text=True) as flow:
        while not all(p.exists() and p.read_text() for p in pids):
            assert flow.poll() is None
            time.sleep(0.1)
        flow.send_signal(number)
        heard, _ = flow.communicate(timeout=60)
    assert heard.endswith(f"{said}\n") and flow.returncode == 0
    assert not any(psutil.pid_exists(int(p.read_text())) for p in pids)
    assert not (tmp_path / "d-2").exists() and not (tmp_path / "e-2").exists()
    assert sorted((tmp_path / "restored").read_text().split()) == ["hangs-2", "hangs-3"]
