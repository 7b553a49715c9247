import subprocess
import sys

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
        assert "Exception ignored" in done.stderr and done.stderr.rstrip().endswith("KeyboardInterrupt")
