"""The Prefect task that runs one DVC stage.

DVC decides whether anything must run and owns the only cache, so the task has none of its own. Its state is named for
what happened: Executed, Cached (nothing had changed) or Restored (DVC put back an earlier result).
"""

import contextlib
import re
import subprocess
import sys
from typing import Any

import psutil
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed

from tasks import interrupts

DVC = (sys.executable, "-m", "dvc")
USER_ERROR = re.compile(r"exited with 2$", re.MULTILINE)
"""How DVC reports a stage whose bad input is the user's to mend (tasks/__main__.py)."""
HINTS = (
    "To track the changes with git, run:",
    "git add dvc.lock",
    "To enable auto staging, run:",
    "dvc config core.autostage true",
    "Use `dvc push` to send your updates to remote storage.",
)
"""What DVC says after every stage, and nobody has to do here."""

_running: set[subprocess.Popen[str]] = set()


class StageFailed(Exception):
    """A stage failed for a reason that running it again may mend."""


def _worth_retrying(task: Any, run: Any, state: State) -> bool:
    return state.name != "BadInput"


@task(task_run_name="{stage}", cache_policy=NO_CACHE, persist_result=False, retries=2, retry_delay_seconds=[10, 60],
      retry_condition_fn=_worth_retrying)  # fmt: skip
def run_stage(stage: str, environment: dict[str, str], target: str, alone: bool = True) -> State:
    """`dvc repro -s <target>`, its output in the task's log. target: what DVC calls the stage. alone: not beside others.

    Ends Executed, Cached or Restored; BadInput, without a retry, when the stage says what the user must mend.
    """
    interrupts.check()
    log = get_run_logger()
    said: list[str] = []
    command = [*DVC, "--wait-for-lock", "repro", "--single-item", target]
    # On a terminal a live bar goes straight there, and one only; a stage's lines always come through the log.
    errors = None if alone and sys.stderr.isatty() else subprocess.STDOUT
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process:
        _running.add(process)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                interrupts.check()
                if (line := line.rstrip()) and line.strip() not in HINTS:
                    said.append(line)
                    log.info(line)
            interrupts.check()
        except BaseException:
            _stop(process)
            _restore(target, environment)
            raise
        finally:
            _running.discard(process)
    text = "\n".join(said)
    if process.returncode:
        _restore(target, environment)
        spoken = [s for s in said if s.startswith(f"{stage}: ")] or [s for s in said if s.startswith("ERROR: ")]
        last = spoken[-1] if spoken else f"{stage}: dvc exited with {process.returncode}"
        if USER_ERROR.search(text):
            return Failed(message=last, name="BadInput")
        raise StageFailed(last)
    if "Running stage" in text:
        return Completed(message=f"{stage} ran", name="Executed")
    if "is cached - skipping run" in text:
        return Completed(message=f"{stage}: DVC put back an earlier result", name="Restored")
    return Completed(message=f"{stage}: nothing changed", name="Cached")


def _restore(target: str, environment: dict[str, str]) -> None:
    """DVC deletes a stage's earlier result before it runs the stage; its cache still has it."""
    subprocess.run([*DVC, "--quiet", "--wait-for-lock", "checkout", target], env=environment, capture_output=True)


def stop_all() -> None:
    """Stop what runs in other threads: signals reach the main one alone."""
    for process in list(_running):
        _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    """Stop DVC and the stage below it: DVC alone would leave the stage running."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(process.pid)
        family = [*first.children(recursive=True), first]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
        _, alive = psutil.wait_procs(family, timeout=15)
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
