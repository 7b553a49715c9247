import errno
import os
import subprocess
import sys

import pytest

from tasks import __main__ as entry
from tasks import store
from tasks.errors import UserError
from tasks.stages import Piece
from windquant.errors import InputError


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(entry, "_logging", lambda stage, file: None)
    monkeypatch.setattr(entry.signal, "signal", lambda *a: None)


def safetensors_on_a_full_disk():
    """safetensors' own error, which is no OSError."""
    from safetensors import SafetensorError

    return SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def sqlite_on_a_full_disk():
    error = RuntimeError("MLflow could not write")
    error.__cause__ = OSError("database or disk is full")
    return error


@pytest.mark.parametrize(
    ("raised", "code", "sentence"),
    [
        (UserError("the value, the rule, the remedy"), 2, "the value, the rule, the remedy"),
        (KeyboardInterrupt(), 130, "interrupted; what is done is kept"),
        (OSError(errno.ENOSPC, "No space left on device"), 3, "the disk is full; free some space"),
        (safetensors_on_a_full_disk(), 3, "the disk is full; free some space"),
        (sqlite_on_a_full_disk(), 3, "the disk is full; free some space"),
        (InputError("a library's sentence"), 2, "a library's sentence"),
        (MemoryError(), 3, "memory ran out; close other programs"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 3, "memory ran out"),
        (RuntimeError("a bug"), 1, "Traceback"),
        (OSError(errno.EACCES, "denied"), 1, "Traceback"),
    ],
)
def test_an_error_ends_in_its_exit_code_and_a_sentence(monkeypatch, caplog, raised, code, sentence):
    def fail(stage, log_file):
        raise raised

    monkeypatch.setattr(entry, "_run", fail)
    assert entry.main(["calibrate"]) == code
    assert Piece("calibrate").exit_code.read_text() == str(code)
    assert sentence in caplog.text and ("Traceback" in caplog.text) == (sentence == "Traceback")


@pytest.mark.parametrize("argv", [[], ["train"], ["calibrate", "quantize"]])
def test_an_unknown_stage_prints_the_usage(argv, capsys):
    assert entry.main(argv) == 2
    assert "usage: python -m tasks <prepare|calibrate" in capsys.readouterr().err


def test_the_libraries_bars_work_in_a_log():
    """With what the stages set, a bar of lm-eval's kind can be drawn and comes out as a line."""
    code = "import tqdm; t = tqdm.tqdm(total=4); t.start_t -= 9; t.last_print_t -= 9; t.update(2); t.refresh()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | entry.IN_A_LOG, capture_output=True, text=True)
    assert done.returncode == 0 and "2/4" in done.stderr, done.stderr


def test_the_fingerprint_sees_params_code_and_data():
    deps = ["code.py", "data"]
    store.Path("code.py").write_text("a")
    store.Path("data").mkdir()
    (store.Path("data") / "x").write_text("1")
    seen = [entry._fingerprint("calibrate", {"windows": 1}, deps), entry._fingerprint("calibrate", {"windows": 2}, deps)]
    store.Path("code.py").write_text("b")
    seen.append(entry._fingerprint("calibrate", {"windows": 1}, deps))
    (store.Path("data") / "x").write_text("2")
    seen.append(entry._fingerprint("calibrate", {"windows": 1}, deps))
    assert len(set(seen)) == 4 and seen[3] == entry._fingerprint("calibrate", {"windows": 1}, deps)


def test_a_missing_dependency_names_the_remedy():
    with pytest.raises(UserError, match="artifacts/prepare is missing, which calibrate needs; run `dvc repro calibrate`"):
        entry._fingerprint("calibrate", {}, ["artifacts/prepare"])


def test_a_lines_first_word_is_the_run_it_comes_from(tmp_path):
    """By which the Prefect task finds the sentence that says what went wrong."""
    code = "from tasks import __main__ as m; import pathlib; m._logging('baselines-rtn-2', pathlib.Path('x/log.txt')); m.log.error('why')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True,
                          env=os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(entry.__file__))})  # fmt: skip
    assert done.stdout == "baselines-rtn-2: why\n"
