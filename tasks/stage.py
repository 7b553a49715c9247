"""The Prefect task that runs one DVC stage.

DVC decides whether anything must run and owns the only cache, so the task has none of its own. Its state is named for
what happened: Executed, Cached (nothing had changed) or Restored (DVC put back an earlier result).
"""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psutil
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed

from tasks import interrupts
from tasks.stages import NO_ROOM, USER_ERROR, Piece

DVC = (sys.executable, "-m", "dvc")
USERS = {str(USER_ERROR): "BadInput", str(NO_ROOM): "NoRoom"}
"""Exit codes of a stage that ended in a sentence, as its file has them, and the states that they make."""
HINTS = (
    "To track the changes with git, run:",
    "git add dvc.lock",
    "To enable auto staging, run:",
    "dvc config core.autostage true",
    "Use `dvc push` to send your updates to remote storage.",
)
"""What DVC says after every stage, and nobody has to do here."""

_running: set[subprocess.Popen[str]] = set()
_stopping = threading.Event()


class StageFailed(Exception):
    """A stage failed for a reason that running it again may mend."""


def _worth_retrying(task: Any, run: Any, state: State) -> bool:
    return state.name not in USERS.values()


@task(task_run_name="{piece.name}", cache_policy=NO_CACHE, persist_result=False, retries=2, retry_delay_seconds=[10, 60],
      retry_condition_fn=_worth_retrying)  # fmt: skip
def run_stage(piece: Piece, environment: dict[str, str], alone: bool = True) -> State:
    """`dvc repro -s` of it, its output in the task's log. alone: not beside others.

    Ends Executed, Cached or Restored; BadInput or NoRoom, without a retry, when the stage says what the user must mend.
    """
    _check()
    log = get_run_logger()
    said: list[str] = []
    piece.exit_code.unlink(missing_ok=True)
    command = [*DVC, "--wait-for-lock", "repro", "--single-item", piece.target]
    # On a terminal a live bar goes straight there, and one only; a stage's lines always come through the log.
    errors = None if alone and sys.stderr.isatty() else subprocess.STDOUT
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process:
        _running.add(process)
        try:
            assert process.stdout is not None
            _check()
            for line in process.stdout:
                _check()
                if (line := line.rstrip()) and line.strip() not in HINTS:
                    said.append(line)
                    log.info(line)
            _check()
        except BaseException:
            _stop(process)
            _restore(piece.target, environment)
            raise
        finally:
            _running.discard(process)
    if process.returncode:
        _restore(piece.target, environment)
        spoken = [s for s in said if s.startswith(f"{piece.name}: ")] or [s for s in said if s.startswith("ERROR: ")]
        last = spoken[-1] if spoken else f"{piece.name}: dvc exited with {process.returncode}"
        code = piece.exit_code.read_text() if piece.exit_code.exists() else ""
        if code in USERS:
            return Failed(message=last, name=USERS[code])
        raise StageFailed(last)
    text = "\n".join(said)
    if "Running stage" in text:
        return Completed(message=f"{piece.name} ran", name="Executed")
    if "is cached - skipping run" in text:
        return Completed(message=f"{piece.name}: DVC put back an earlier result", name="Restored")
    return Completed(message=f"{piece.name}: nothing changed", name="Cached")


def _restore(target: str, environment: dict[str, str]) -> None:
    """DVC deletes a stage's earlier result before it runs the stage; its cache still has it."""
    subprocess.run([*DVC, "--quiet", "--wait-for-lock", "checkout", target], env=environment, capture_output=True)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """For stages that run in other threads: what raises in here, an interrupt or whatever Prefect stops a flow with, stops
    them all, and those that would have begun."""
    _stopping.clear()
    try:
        yield
    except BaseException:
        _stopping.set()
        _stop(*_running)
        raise


def _check() -> None:
    interrupts.check()
    if _stopping.is_set():
        raise interrupts.Interrupted


def _stop(*processes: subprocess.Popen[str]) -> None:
    """Stop DVC and the stage below it: DVC alone would leave the stage running."""
    family: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(process.pid)
            family += [*first.children(recursive=True), first]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    try:
        psutil.wait_procs(family, timeout=15)
    finally:  # a second interrupt only makes the wait shorter
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
