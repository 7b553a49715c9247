"""MLflow: the one module that knows it.

Database mlruns/mlflow.db, files under mlruns/artifacts, both addressed absolutely, so that a stage which runs in a copy
of the project (`dvc exp run --temp`) records in the project itself.
"""

import contextlib
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from filelock import FileLock

from tasks import store
from tasks.errors import UserError, first_line
from tasks.job import Record
from tasks.stages import Piece

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger("windquant")
EXPERIMENT = "windquant"
PARENT = "WINDQUANT_PARENT_RUN"
"""Environment variable with the id of the pipeline's run, under which a stage nests its own."""


def uri() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{store.home() / 'mlruns' / 'mlflow.db'}"


def client() -> tuple["MlflowClient", str]:
    """The client and the experiment's id; creates both once, under a lock: MLflow's own first use races."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    folder = store.home() / "mlruns"
    folder.mkdir(exist_ok=True)
    try:
        with FileLock(folder / ".lock"):
            found = MlflowClient(uri())
            experiment = found.get_experiment_by_name(EXPERIMENT)
            if experiment is not None:
                return found, experiment.experiment_id
            return found, found.create_experiment(EXPERIMENT, artifact_location=(folder / "artifacts").as_uri())
    except MlflowException as e:
        raise UserError(f"MLflow cannot record at {uri()}: {first_line(e)}; correct MLFLOW_TRACKING_URI") from e


@dataclass
class Run:
    """An open run. `log` writes a Record into it, children as nested runs."""

    client: "MlflowClient"
    experiment: str
    id: str

    def log(self, record: Record) -> None:
        _write(self.client, self.id, record)
        for name, child in record.children.items():
            run = _create(self.client, self.experiment, name, self.id, child.tags)
            _write(self.client, run, child)
            self.client.set_terminated(run, "FINISHED")
        if record.published:
            self._publish(record.published)

    def _publish(self, records: dict[str, Record]) -> None:
        """At the top, and each once: those that are there already stay as they are."""
        there = self.client.search_runs([self.experiment], "tags.kind = 'published'", max_results=10_000)
        names = {r.info.run_name for r in there if r.info.status == "FINISHED"}
        for name, record in records.items():
            if name not in names:
                run = _create(self.client, self.experiment, name, None, {"kind": "published"})
                _write(self.client, run, record)
                self.client.set_terminated(run, "FINISHED")

    def file(self, path: Path) -> None:
        if path.exists():
            self.client.log_artifact(self.id, str(path))

    def tag(self, key: str, value: str) -> None:
        self.client.set_tag(self.id, key, value)


@contextmanager
def run(name: str, tags: dict[str, str], log_file: Path | None = None) -> Iterator[Run]:
    """A run that ends as FINISHED, FAILED (with its log) or KILLED (interrupted)."""
    api, experiment = client()
    mark_killed(api, experiment)
    opened = Run(api, experiment, _create(api, experiment, name, os.environ.get(PARENT), tags | _process()))
    status = "FAILED"
    try:
        yield opened
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        # On a full disk this fails as well: the first error is the one to tell, and the next run marks this one killed.
        with contextlib.suppress(Exception) if status == "FAILED" else contextlib.nullcontext():
            if log_file is not None:
                opened.file(log_file)
            api.set_terminated(opened.id, status)


def mark_killed(api: "MlflowClient", experiment: str) -> None:
    """Runs whose process died without a word are still RUNNING: mark them."""
    for r in api.search_runs([experiment], "attributes.status = 'RUNNING'"):
        pid, born = r.data.tags.get("pid"), r.data.tags.get("process_started")
        if pid is None or r.data.tags.get("host") != os.uname().nodename or _alive(int(pid), float(born or 0)):
            continue
        if api.get_run(r.info.run_id).info.status != "RUNNING":  # it has ended since the search
            continue
        api.set_tag(r.info.run_id, "ended", "its process died")
        api.set_terminated(r.info.run_id, "KILLED")
        log.warning(
            "the run '%s' of %s died without ending; marked as killed", r.info.run_name, r.data.tags.get("stage", "?")
        )


def _alive(pid: int, born: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - born) < 2
    except psutil.NoSuchProcess:
        return False


def _process() -> dict[str, str]:
    me = psutil.Process()
    return {"pid": str(me.pid), "process_started": str(me.create_time()), "host": os.uname().nodename}


def _create(api: "MlflowClient", experiment: str, name: str, parent: str | None, tags: dict[str, str]) -> str:
    nested = {"mlflow.parentRunId": parent} if parent else {}
    return api.create_run(experiment, run_name=name, tags={"kind": "measured"} | tags | nested).info.run_id


def _write(api: "MlflowClient", run_id: str, record: Record) -> None:
    from mlflow.entities import Metric, Param, RunTag

    now = int(time.time() * 1000)
    # A NaN or Inf metric breaks MLflow's run page.
    metrics = [Metric(k, float(v), now, 0) for k, v in record.metrics.items() if math.isfinite(v)]
    steps = ((k, v, i) for k, values in record.curves.items() for i, v in enumerate(values))
    metrics += [Metric(k, float(v), now, i) for k, v, i in steps if math.isfinite(v)]
    params = [Param(k, str(v)[:6000]) for k, v in record.params.items()]
    tags = [RunTag(k, v) for k, v in record.tags.items()]
    for i in range(0, max(len(metrics), len(params), len(tags)), 100):
        api.log_batch(run_id, metrics[i : i + 100], params[i : i + 100], tags[i : i + 100])
    for file in record.files:
        api.log_artifact(run_id, str(file))
    for name, columns in record.tables.items():
        _table(api, run_id, name, columns)


def _table(api: "MlflowClient", run_id: str, name: str, columns: dict[str, list[Any]]) -> None:
    import pandas as pd

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.parquet"
        frame = pd.DataFrame(columns)
        frame.to_parquet(file)
        api.log_artifact(run_id, str(file))
    if len(frame) <= 1000:  # MLflow's table viewer holds a table in the page
        api.log_table(run_id, frame, f"{name}.json")


def children_of(run_id: str) -> dict[str, dict[str, float]]:
    """Name -> metrics of the runs nested in a run."""
    api, experiment = client()
    found = api.search_runs([experiment], f"tags.mlflow.parentRunId = '{run_id}'")
    return {r.info.run_name or "": r.data.metrics for r in found}


def summarise(opened: Run, states: dict[Piece, str]) -> None:
    """The pipeline's run: the plan's headline metrics and pictures, what each stage did, the runs that made the
    artifacts, and the hours that what it ran took, with those of interrupted starts that it went on from; those of variants
    side by side are added up."""
    from tasks import settings

    params = settings.load()
    spent = dict.fromkeys(("cpu_hours", "gpu_hours", "wall_seconds"), 0.0)
    record = Record(tags={f"state/{piece.name}": state for piece, state in states.items()})
    for piece, state in states.items():
        if state == "Failed":
            continue
        made = store.load_json(store.run_record(piece.key))
        record.tags[f"run/{piece.name}"] = made["mlflow_run"]
        if state == "Executed":
            spent = {k: v + made[k] for k, v in spent.items()}
        for peak in ("peak_rss_gib", "peak_gpu_gib"):
            record.metrics[peak] = max(record.metrics.get(peak, 0.0), made[peak])
    compared = store.path("compare")
    record.metrics |= store.load_json(compared / "metrics.json") | spent
    for section in settings.SECTIONS:
        record.params |= params.flat(section)
    record.params |= store.load_json(compared / "params.json")
    record.files = [*sorted(compared.glob("*.png")), compared / "table.md"]
    opened.log(record)
    opened.tag("mlflow.runName", f"pipeline {record.params['allocator']} {record.params['target_bits']:g}")
