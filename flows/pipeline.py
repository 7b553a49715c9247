"""The pipeline: every stage through DVC, in order, under one MLflow run.

Scheduled by prefect.yaml; by hand `python -m flows.run`. `dvc repro` makes the same artifacts without Prefect.
"""

import os
import signal
import sys
from itertools import groupby
from typing import Any

from flows.environment import ROOT, setup

setup()

from prefect import flow  # noqa: E402
from prefect.client.schemas.objects import State  # noqa: E402
from prefect.futures import PrefectFuture, as_completed  # noqa: E402
from prefect.logging import get_run_logger  # noqa: E402
from prefect.states import Completed, Failed  # noqa: E402
from prefect.task_runners import ThreadPoolTaskRunner  # noqa: E402

from tasks import interrupts, settings, store, tracking  # noqa: E402
from tasks.baselines import ADMITTED  # noqa: E402
from tasks.errors import UserError  # noqa: E402
from tasks.stage import USERS, StageFailed, run_stage, together  # noqa: E402
from tasks.stages import MATRIX, Piece, pieces  # noqa: E402


@flow(name="pipeline")
def pipeline(every_baseline: bool = False) -> State:
    """Run what has changed, from prepare to compare. An unchanged pipeline does no work and says so. every_baseline: all
    methods at 2, 3 and 4 bits, instead of those in params.yaml."""
    os.chdir(ROOT)
    log = get_run_logger()
    every = {"methods": list(ADMITTED), "bits": [2, 3, 4]} if every_baseline else {}
    try:
        with settings.temporarily("baselines", every), tracking.run("pipeline", {"stage": "pipeline"}) as opened:
            environment = dict(os.environ) | {tracking.PARENT: opened.id, "PYTHONUNBUFFERED": "1"}
            states = _run_all(settings.load(), environment)
            tracking.summarise(opened, states)
    except (UserError, StageFailed) as e:
        # Returned, not raised: one sentence and no traceback.
        return Failed(message=str(e), name="BadInput" if isinstance(e, UserError) else "Failed")
    executed, failed = ([p.name for p, s in states.items() if s == name] for name in ("Executed", "Failed"))
    if not executed and not failed:
        log.info("nothing changed: all %d stages are up to date, no work was done", len(states))
    message = f"executed: {', '.join(executed) or 'nothing'}"
    if failed:
        message += f"; failed, and tried again by the next run: {', '.join(failed)}"
        log.warning(message)
    return Completed(message=message, name="Executed" if executed else "Cached")


def _run_all(params: settings.Params, environment: dict[str, str]) -> dict[Piece, str]:
    """Every piece in order, and the name of the state it ended in."""
    states: dict[Piece, str] = {}
    for stage, group in groupby(pieces(params.baselines.variants), lambda piece: piece.stage):
        if stage == MATRIX:
            states |= _variants(list(group), params.baselines.workers(params.common), environment)
        else:
            states |= {piece: _run(piece, environment) for piece in group}
    return states


def _run(piece: Piece, environment: dict[str, str]) -> str:
    state = run_stage(piece, environment, return_state=True)
    if not state.is_completed():
        raise (UserError if state.name in USERS.values() else StageFailed)(state.message)
    return state.name or "Completed"


def _variants(group: list[Piece], workers: int, environment: dict[str, str]) -> dict[Piece, str]:
    """Some side by side. One that fails does not stop the others; it is tried again when it has the machine to itself."""
    # With no retries at all Prefect would log a traceback.
    once = run_stage.with_options(retries=1, retry_condition_fn=lambda task, run, state: False)
    states: dict[Piece, State] = {}
    with ThreadPoolTaskRunner(max_workers=workers) as runner, together():
        common = {"environment": environment, "alone": workers == 1}
        begun: dict[PrefectFuture[Any], Piece] = {runner.submit(once, {"piece": piece} | common): piece for piece in group}
        for future in as_completed(list(begun)):
            future.wait()  # without which Prefect asks its server, and that may not know yet
            states[begun[future]] = _noted(begun[future], future.state)
    for piece, state in states.items():
        if not state.is_completed() and state.name != "BadInput":
            states[piece] = _noted(piece, once(piece, environment, return_state=True))
    return {p: (states[p].name or "Completed") if states[p].is_completed() else "Failed" for p in group}


def _noted(piece: Piece, state: State) -> State:
    if state.is_completed():
        store.failure(piece.key).unlink(missing_ok=True)  # also when DVC put back an earlier result and nothing ran
    return state


def main() -> int:
    interrupts.listen(signal.SIGINT)
    try:
        state = pipeline(every_baseline="--every-baseline" in sys.argv, return_state=True)
    except KeyboardInterrupt:
        print("\ninterrupted; run again to go on from there", file=sys.stderr)
        return 130
    if not state.is_completed():
        print(f"\n{state.message}\nThe log above, and the failed run in MLflow, say more.", file=sys.stderr)
        return 2 if state.name == "BadInput" else 1
    print((ROOT / "artifacts/compare/table.md").read_text().split("\n\n## ")[0])
    print("\nCompletions side by side, and this table: artifacts/compare/table.md; plots beside it")
    print("MLflow UI:   make ui        then open http://127.0.0.1:5000")
    print("Prefect UI:  make serve     then open http://127.0.0.1:4200")
    return 0


if __name__ == "__main__":
    sys.exit(main())
