"""`python -m tasks <stage> [<variant>]`: run one stage in this process, of `baselines` one variant. What dvc.yaml calls.

Exit codes: 0 done; 2 the user's to mend, 3 memory or the disk is full (one sentence says what); 130 interrupted; 1 anything
else, with a traceback. The last one of a stage is kept beside its log, for a pipeline that sees no more than DVC's.
"""

import contextlib
import errno
import functools
import hashlib
import importlib
import json
import logging
import os
import shutil
import signal
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Nothing heavier up here: an interrupt while torch is imported must end in a sentence too.
from tasks import interrupts
from tasks.errors import UserError, first_line
from tasks.stages import MATRIX, NO_ROOM, STAGES, USER_ERROR, Piece
from windquant.errors import InputError

log = logging.getLogger("windquant")
INTERRUPTED = 130
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "LOGLEVEL": "ERROR",  # lm-eval's
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""The libraries' own bars and hints would drown ours."""
IN_A_LOG = {"TQDM_MININTERVAL": "5", "TQDM_DELAY": "5"}
"""lm-eval's bars, in a log: none for what is short, a line every five seconds for the rest."""


def main(argv: list[str]) -> int:
    if len(argv) not in (1, 2) or argv[0] not in STAGES or (len(argv) == 2) != (argv[0] == MATRIX):
        print(f"usage: python -m tasks <{'|'.join(STAGES)}>; {MATRIX} with <method>-<bits> behind it", file=sys.stderr)
        return USER_ERROR
    piece = Piece(*argv)
    interrupts.listen(signal.SIGTERM, signal.SIGINT)
    code = _work(piece)
    with contextlib.suppress(OSError):
        piece.exit_code.parent.mkdir(parents=True, exist_ok=True)
        piece.exit_code.write_text(str(code))
    return code


def _work(piece: Piece) -> int:
    try:
        _logging(piece.name, piece.log_file)
        _run(piece, piece.log_file)
        interrupts.ignore()
        return 0
    except (KeyboardInterrupt, Exception) as e:
        interrupts.ignore()
        if isinstance(e, KeyboardInterrupt) or interrupts.asked():
            log.error("interrupted; what is done is kept, the next run goes on from there")
            return INTERRUPTED
        of_user = str(e) if isinstance(e, UserError | InputError) else None
        sentence = of_user or _resource_sentence(e)
        log.error("%s", sentence or traceback.format_exc())
        if piece.variant:
            _note_failure(piece, sentence or f"{type(e).__name__}: {first_line(e)}")
        return USER_ERROR if of_user else NO_ROOM if sentence else 1


def _note_failure(piece: Piece, reason: str) -> None:
    """Beside the results of the others, where `compare` finds it: DVC keeps nothing of what failed."""
    from tasks import store

    store.run_record(piece.key).parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # a full disk
        store.save_json(store.failure(piece.key), {"variant": piece.variant, "reason": reason})


def _logging(name: str, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    logging.raiseExceptions = False  # a full disk is reported once, not with every line of the log
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    if not sys.stderr.isatty():
        os.environ |= IN_A_LOG
    handlers = [logging.StreamHandler(sys.stdout), logging.FileHandler(file, mode="w")]
    handlers[0].setFormatter(logging.Formatter(f"{name}: %(message)s"))
    handlers[1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for handler in handlers:
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def _run(piece: Piece, log_file: Path) -> None:
    from tasks import settings, store, tracking, usage
    from tasks.job import Record

    params = settings.load()
    stage, key = piece.stage, piece.key
    declared = _declared(stage)
    fingerprint = _fingerprint(stage, {"variant": piece.variant} | _tracked(declared["params"], params), declared["deps"])
    with tracking.run(piece.name, {"stage": stage} | _provenance(), log_file) as opened:
        opened.log(Record(params=params.flat("common") | params.flat(stage)))
        scratch = store.Scratch(key, fingerprint)
        if scratch.resumed:
            log.info("going on where an interrupted run stopped")
        out = store.state(key) / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        cpu = usage.cpu_seconds()
        with scratch.clock("stage") as clock:
            record = _stage(piece, params, out, scratch)
            interrupts.check()
        took = _usage(clock.seconds, usage.cpu_seconds() - cpu)
        record.metrics = took | record.metrics
        opened.log(record)
        shutil.rmtree(store.path(key), ignore_errors=True)
        store.path(key).parent.mkdir(parents=True, exist_ok=True)
        os.replace(out, store.path(key))
        store.failure(key).unlink(missing_ok=True)
        store.save_json(store.run_record(key), {"mlflow_run": opened.id} | took | record.extra)
        scratch.clear()
    log.info("done in %.0f s", took["wall_seconds"])


def _stage(piece: Piece, params: Any, out: Path, scratch: Any) -> Any:
    import torch

    from windquant import memory

    memory.return_large()
    from tasks.job import Job
    from tasks.reach import reach

    torch.set_num_threads(_threads(piece, params))
    torch.manual_seed(params.common.seed)

    def check_target(model: torch.nn.Module) -> str:
        table = params.sensitivity
        dial = reach(model, table.chunk_size, params.allocate.embedding_bits, table.protection)
        return f"target {dial.target_bits(params.allocate):.4g} effective bits; {dial}"

    module = importlib.import_module(f"tasks.{piece.stage}")
    interrupts.check()
    job = Job(piece.stage, params.common, out, scratch, check_target, piece.variant, lambda name: getattr(params, name))
    return module.run(getattr(params, piece.stage), job)


def _threads(piece: Piece, params: Any) -> int:
    """For a variant its share, also where it runs by itself: the number of threads shows in the last bits of results."""
    import torch

    workers = params.baselines.workers(params.common) if piece.variant else 1
    return max(1, (params.common.threads or torch.get_num_threads()) // workers)


def _declared(stage: str) -> dict[str, Any]:
    """What dvc.yaml says of a stage."""
    from ruamel.yaml import YAML

    return YAML(typ="safe").load(Path("dvc.yaml").read_text())["stages"][stage]


def _tracked(names: list[str], params: Any) -> dict[str, Any]:
    """The sections and values of these names."""
    tracked = {}
    for name in names:
        value = functools.reduce(getattr, name.split("."), params)
        tracked[name] = value if "." in name else asdict(value)
    return tracked


def _fingerprint(stage: str, params: dict[str, Any], deps: list[str]) -> str:
    """Of all that the stage's result depends on: its parameters and dependencies."""
    from tasks import store

    digest = hashlib.sha256(json.dumps(params, sort_keys=True).encode())
    for dep in map(Path, deps):
        if not dep.exists():
            raise UserError(f"{dep} is missing, which {stage} needs; run `dvc repro {stage}`, which makes it first")
        digest.update((store.hash_tree(dep) if dep.is_dir() else store.hash_file(dep)).encode())
    return digest.hexdigest()


def _provenance() -> dict[str, str]:
    """git commit, and hash of the lock file that the run started from."""
    import subprocess

    from tasks import store

    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    lock = Path("dvc.lock")
    return {
        "git_sha": done.stdout.strip() or "none",
        "dvc_lock": store.hash_file(lock) if lock.exists() else "none",
    }


def _usage(wall: float, cpu: float) -> dict[str, float]:
    """wall: seconds, with those of interrupted starts; cpu, and peaks: of this start."""
    from tasks import usage

    return {
        "wall_seconds": wall,
        "cpu_hours": cpu / 3600,
        "gpu_hours": usage.gpus() * wall / 3600,
        "peak_rss_gib": usage.peak_rss_gib(),
        "peak_gpu_gib": usage.peak_gpu_gib(),
    }


def _resource_sentence(e: BaseException | None) -> str | None:
    """For a full disk or memory, wherever in the chain of causes: libraries wrap both in errors of their own."""
    while e is not None:
        text = str(e).lower()
        full = isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "no space left on device" in text or "database or disk is full" in text:
            return "the disk is full; free some space and run again, what is done is kept"
        if isinstance(e, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
            return "memory ran out; close other programs, or lower prepare.window and benchmark.batch_size"
        e = e.__cause__ or e.__context__
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
