"""Where artifacts lie, and how tensors, tables and JSON are read and written.

Layout: artifacts/<stage>/ is what a stage makes, the same bytes for the same inputs; artifacts/runs/<stage>.json says
which run made it (MLflow run, hours, memory) and differs from run to run, so it lies apart and only `compare` reads it.
Of a stage that DVC runs as a matrix, <stage> is here <stage>/<variant>.
.state/<stage>/ is the stage's own: the half-made output, and what an interrupted run resumes from. .state/shared/ is
described in `tasks.shared`.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.errors import UserError, first_line


def home() -> Path:
    """The project's own folder: `dvc exp run --temp` runs stages in a copy of it."""
    return Path(os.environ.get("DVC_ROOT") or ".").resolve()


def path(stage: str) -> Path:
    """The folder of a stage's artifacts, relative to the project (a stage runs in the project's root)."""
    return Path("artifacts") / stage


def run_record(stage: str) -> Path:
    return Path("artifacts/runs") / f"{stage}.json"


def failure(stage: str) -> Path:
    """What is noted of a variant that failed, until it succeeds; beside the others' results, no output of a stage."""
    return path(stage).with_name(f"{path(stage).name}.failed.json")


def state(stage: str) -> Path:
    return Path(".state") / stage


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """A file to write; it takes the other's place when that went well, so that none is ever seen half-written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    yield temporary
    os.replace(temporary, file)


def save_text(file: Path, text: str) -> None:
    with _replacing(file) as temporary:
        temporary.write_text(text)


def save_json(file: Path, value: Any) -> None:
    save_text(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def load_json(file: Path) -> Any:
    return json.loads(_existing(file).read_text())


def save_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    with _replacing(file) as temporary:
        save_file({k: v.contiguous() for k, v in tensors.items()}, temporary)


def load_tensors(file: Path) -> dict[str, Tensor]:
    return load_file(_existing(file))


def save_table(file: Path, columns: dict[str, list[Any]], header: dict[str, Any]) -> None:
    """A parquet file with a JSON header in its metadata."""
    table = pa.table(columns).replace_schema_metadata({"windquant": json.dumps(header, sort_keys=True)})
    with _replacing(file) as temporary:
        pq.write_table(table, temporary)


def load_table(file: Path) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    try:
        table = pq.read_table(_existing(file))
    except (pa.ArrowInvalid, OSError) as e:
        raise UserError(f"{file} is damaged ({first_line(e)}); run `dvc repro` to make it again") from e
    metadata = table.schema.metadata or {}
    try:
        header = json.loads(metadata[b"windquant"])
    except (KeyError, ValueError):
        header = None
    if not isinstance(header, dict):
        raise UserError(f"{file} is not a table of this project: it has no header; run `dvc repro` to make it again")
    return table.to_pydict(), header


def _existing(file: Path) -> Path:
    if not file.exists():
        raise UserError(f"{file} is missing; run `dvc repro`, which makes what a stage needs first")
    return file


def hash_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_tree(folder: Path, pattern: str = "*") -> str:
    """One sha256 over the names and contents of a folder's files."""
    digest = hashlib.sha256()
    for file in sorted(f for f in folder.rglob(pattern) if f.is_file()):
        digest.update(f"{file.relative_to(folder)}\0{hash_file(file)}\n".encode())
    return digest.hexdigest()


CLOCK = ".clock"
NOT_KEPT = (".tmp", ".txt")
"""Suffixes of what a dying process leaves: a file half-written, last words."""


@dataclass
class Clock:
    """before: seconds of earlier starts whose work is kept. began, until: of this one; None: it runs."""

    before: float
    began: float
    until: float | None = None

    @property
    def seconds(self) -> float:
        return self.before + (time.time() if self.until is None else self.until) - self.began


class Scratch:
    """Resume state of one stage: named sets of tensors and JSON values, kept only while their fingerprint holds."""

    def __init__(self, stage: str, fingerprint: str) -> None:
        self.folder = state(stage) / "resume"
        mark = self.folder / "fingerprint"
        self.resumed = mark.exists() and mark.read_text() == fingerprint
        if not self.resumed:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            mark.write_text(fingerprint)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def has(self, name: str) -> bool:
        return self._file(name).exists()

    def get(self, name: str) -> dict[str, Tensor]:
        with safe_open(self._file(name), "pt") as f:
            return {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118

    def put(self, name: str, tensors: dict[str, Tensor]) -> None:
        save_tensors(self._file(name), tensors)

    def has_json(self, name: str) -> bool:
        return (self.folder / f"{name}.json").exists()

    def get_json(self, name: str) -> Any:
        return load_json(self.folder / f"{name}.json")

    def put_json(self, name: str, value: Any) -> None:
        save_json(self.folder / f"{name}.json", value)

    @contextmanager
    def clock(self, name: str) -> Iterator[Clock]:
        """Times a piece of work, whatever interrupts it: of an earlier start counts the time until it last wrote into the
        folder, for so far its work is kept, and what it did after that is done again."""
        key = f"{name}{CLOCK}"
        clock = Clock(self._spent(key), time.time())
        self.put_json(key, vars(clock))
        yield clock
        clock.until = time.time()
        self.put_json(key, vars(clock))

    def _spent(self, key: str) -> float:
        if not self.has_json(key):
            return 0.0
        clock = Clock(**self.get_json(key))
        end = math.inf if clock.until is None else clock.until
        kept = (f for f in self.folder.rglob("*") if CLOCK not in f.name and f.suffix not in NOT_KEPT and f.is_file())
        clock.until = max(clock.began, *(t for f in kept if (t := f.stat().st_mtime) <= end))
        return clock.seconds

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Memory:
    """A scratch store that keeps nothing after the process."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Tensor]] = {}

    def has(self, name: str) -> bool:
        return name in self._kept

    def get(self, name: str) -> dict[str, Tensor]:
        return self._kept[name]

    def put(self, name: str, tensors: dict[str, Tensor]) -> None:
        self._kept[name] = tensors
