"""The pipeline: every stage through DVC, in order, under one MLflow run.

python -m flows.pipeline        what `make run` calls; `dvc repro` makes the same artifacts without Prefect
"""

import os
import sys

from flows.environment import ROOT, setup

setup()

from prefect import flow  # noqa: E402
from prefect.client.schemas.objects import State  # noqa: E402
from prefect.logging import get_run_logger  # noqa: E402
from prefect.states import Completed  # noqa: E402

from tasks import tracking  # noqa: E402
from tasks.errors import UserError  # noqa: E402
from tasks.stage import run_stage  # noqa: E402
from tasks.store import STAGES  # noqa: E402


@flow(name="pipeline", log_prints=True)
def pipeline() -> State:
    """Run what has changed, from prepare to compare. An unchanged pipeline does no work and says so."""
    os.chdir(ROOT)
    log = get_run_logger()
    with tracking.run("pipeline", {"stage": "pipeline"}) as opened:
        environment = dict(os.environ) | {tracking.PARENT: opened.id, "PYTHONUNBUFFERED": "1"}
        names = {}
        for stage in STAGES:
            state = run_stage(stage, environment, return_state=True)
            if state.name == "BadInput":
                raise UserError(state.message)
            state.result()  # raises what the stage raised
            names[stage] = state.name
        executed = [s for s, name in names.items() if name == "Executed"]
        tracking.summarise(opened, names)
    if not executed:
        log.info("nothing changed: all %d stages are up to date, no work was done", len(STAGES))
    message = f"executed: {', '.join(executed) or 'nothing'}"
    return Completed(message=message, name="Executed" if executed else "Cached")


def main() -> int:
    try:
        pipeline()
    except UserError as e:
        print(f"\n{e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; run again to go on from there", file=sys.stderr)
        return 130
    except Exception as e:
        print(f"\n{e}\nThe log above and the failed run in MLflow say more.", file=sys.stderr)
        return 1
    print((ROOT / "artifacts/compare/table.md").read_text().split("\n\n## ")[0])
    print("\nCompletions side by side, and this table: artifacts/compare/table.md; plots beside it")
    print("MLflow UI:   make ui        then open http://127.0.0.1:5000")
    print("Prefect UI:  make serve     then open http://127.0.0.1:4200")
    return 0


if __name__ == "__main__":
    sys.exit(main())
