"""The pipeline: every stage through DVC, in order, under one MLflow run.

Scheduled by prefect.yaml; by hand `python -m flows.run`. `dvc repro` makes the same artifacts without Prefect.
"""

import os
import signal
import sys

from flows.environment import ROOT, setup

setup()

from prefect import flow  # noqa: E402
from prefect.client.schemas.objects import State  # noqa: E402
from prefect.logging import get_run_logger  # noqa: E402
from prefect.states import Completed, Failed  # noqa: E402

from tasks import interrupts, settings, store, tracking  # noqa: E402
from tasks.baselines import ADMITTED  # noqa: E402
from tasks.errors import UserError  # noqa: E402
from tasks.stage import StageFailed, run_stage  # noqa: E402
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
            states = {piece: _run(piece, environment) for piece in pieces(settings.load().baselines.variants)}
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


def _run(piece: Piece, environment: dict[str, str]) -> str:
    """Run one piece; the name of the state it ended in. A baseline that fails does not stop the others."""
    state = run_stage(piece.name, environment, piece.target, return_state=True)
    if not state.is_completed():
        if piece.stage == MATRIX:
            return "Failed"
        raise (UserError if state.name == "BadInput" else StageFailed)(state.message)
    if piece.stage == MATRIX:
        store.failure(piece.key).unlink(missing_ok=True)  # also when DVC put back an earlier result and nothing ran
    return state.name or "Completed"


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
