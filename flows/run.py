"""`python -m flows.run [--every-baseline]`: the pipeline on this machine, now. What `make run` and `make baselines` call.

The flow runs in a session of its own. A terminal's Ctrl-C goes to every process of the foreground, Prefect's temporary
server too, and a flow whose server is gone cannot end; so it reaches this process alone, which passes it on.
"""

import signal
import subprocess
import sys
from types import FrameType


def main() -> int:
    child = subprocess.Popen([sys.executable, "-m", "flows.pipeline", *sys.argv[1:]], start_new_session=True)

    def pass_on(signum: int, frame: FrameType | None) -> None:
        child.send_signal(signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
