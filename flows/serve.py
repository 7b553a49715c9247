"""`python -m flows.serve`: a Prefect server, a worker and the schedules of prefect.yaml, on loopback, state in .prefect/.

Stops all of it on Ctrl-C.
"""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import FrameType
from typing import IO

from flows.environment import HOME, ROOT, setup

setup()

HOST, PORT = "127.0.0.1", os.environ.get("PORT", "4200")
POOL = "windquant"


def main() -> int:
    os.chdir(ROOT)
    HOME.mkdir(exist_ok=True)
    os.environ["PREFECT_API_URL"] = f"http://{HOST}:{PORT}/api"
    signal.signal(signal.SIGTERM, _interrupt)
    if _answers():
        print(f"something already serves http://{HOST}:{PORT}; stop it, or choose another port: make serve PORT=4201")
        return 2
    log = (HOME / "server.log").open("a")
    processes = [_prefect("server", "start", "--host", HOST, "--port", PORT, log=log)]
    try:
        print("starting the Prefect server", flush=True)
        _wait(processes[0])
        _prefect("work-pool", "create", POOL, "--type", "process", "--overwrite", log=log).wait()
        if _prefect("--no-prompt", "deploy", "--all", log=log).wait():
            print(f"the deployments of prefect.yaml could not be made; {HOME / 'server.log'} says why", file=sys.stderr)
            return 1
        processes.append(_prefect("worker", "start", "--pool", POOL, "--name", "windquant", log=None))
        print(f"Prefect UI: http://{HOST}:{PORT}   schedules: prefect.yaml   stop: Ctrl-C", flush=True)
        while all(p.poll() is None for p in processes):
            time.sleep(1)
        print(f"the server or the worker stopped by itself; {HOME / 'server.log'} says why", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopping", flush=True)
        return 0
    finally:
        for p in reversed(processes):
            _stop(p)


def _prefect(*arguments: str, log: IO[str] | None) -> subprocess.Popen[str]:
    # A session of its own: the terminal's Ctrl-C reaches this process alone, which then stops them in order.
    return subprocess.Popen(
        [sys.executable, "-m", "prefect", *arguments], text=True, start_new_session=True, stdout=log, stderr=log
    )


def _answers() -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{PORT}/api/health", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _wait(server: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 180
    while not _answers():
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the Prefect server did not start; {HOME / 'server.log'} says why")
        time.sleep(0.5)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
