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

from tasks import interrupts, tracking  # noqa: E402
from tasks.errors import UserError  # noqa: E402
from tasks.stage import StageFailed, run_stage  # noqa: E402
from tasks.stages import STAGES  # noqa: E402


@flow(name="pipeline")
def pipeline() -> State:
    """Run what has changed, from prepare to compare. An unchanged pipeline does no work and says so."""
    os.chdir(ROOT)
    log = get_run_logger()
    try:
        with tracking.run("pipeline", {"stage": "pipeline"}) as opened:
            environment = dict(os.environ) | {tracking.PARENT: opened.id, "PYTHONUNBUFFERED": "1"}
            states = {stage: _stage(stage, environment) for stage in STAGES}
            tracking.summarise(opened, states)
    except (UserError, StageFailed) as e:
        # Returned, not raised: one sentence and no traceback.
        return Failed(message=str(e), name="BadInput" if isinstance(e, UserError) else "Failed")
    executed = [s for s, name in states.items() if name == "Executed"]
    if not executed:
        log.info("nothing changed: all %d stages are up to date, no work was done", len(STAGES))
    message = f"executed: {', '.join(executed) or 'nothing'}"
    return Completed(message=message, name="Executed" if executed else "Cached")


def _stage(stage: str, environment: dict[str, str]) -> str:
    """Run one stage; the name of the state it ended in."""
    state = run_stage(stage, environment, return_state=True)
    if not state.is_completed():
        raise (UserError if state.name == "BadInput" else StageFailed)(state.message)
    return state.name or "Completed"


def main() -> int:
    interrupts.listen(signal.SIGINT)
    try:
        state = pipeline(return_state=True)
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
