import os
import subprocess
import sys
from pathlib import Path

import pytest

SWALLOWED = """
import os, signal
from tasks import interrupts, progress

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.{signal})
        [None for _ in range(1000)]  # here Python notices the signal, and drops what its handler raises

interrupts.listen(signal.SIGINT, signal.SIGTERM)
interrupts.check()
Finalized()
print("unheard", flush=True)
progress.bar("blocks")(1, 2)
print("went on")
"""


def test_an_interrupt_that_python_drops_ends_the_work_at_its_next_step():
    for signal in ("SIGINT", "SIGTERM"):
        done = subprocess.run([sys.executable, "-c", SWALLOWED.format(signal=signal)], capture_output=True, text=True)
        assert done.stdout == "unheard\n"
        assert "Exception ignored" in done.stderr and done.stderr.rstrip().endswith("Interrupted")


MAIN = """
import os, signal, sys
from tasks import __main__ as entry

def work(stage, file):
    {work}

entry._run, entry._logging = work, lambda stage, file: entry.logging.basicConfig(format="%(message)s")
sys.exit(entry.main(["prepare"]))
"""


@pytest.mark.parametrize("work", [
    "os.kill(os.getpid(), signal.SIGTERM)",
    'exec("os.kill(os.getpid(), signal.SIGINT)")',  # after which Python would end the process by the signal
    """
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise RuntimeError("a library's own error")
""",
])  # fmt: skip
def test_however_it_is_heard_an_interrupt_ends_in_130_and_a_sentence(work, tmp_path):
    (tmp_path / "stage.py").write_text(MAIN.format(work=work))
    path = f"{Path(__file__).parents[2]}:{tmp_path}"
    command = [sys.executable, "-m", "stage"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 130, done.stderr
    assert done.stderr == "interrupted; what is done is kept, the next run goes on from there\n"
