"""Training in several processes: torchrun starts this module in each, on what a folder says, and the first one leaves there
what was learned. Processes split every step's windows among them and average gradients (DDP; gloo on CPUs, NCCL on GPUs).
"""

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tasks import progress, store
from tasks.errors import UserError
from tasks.student import FinetuneConfig, Student, build
from tasks.training import Text, last, train
from windquant.errors import InputError

JOB, TEXT, CURVES, LEARNED = "job.json", "text.safetensors", "curves.json", "learned.safetensors"
ERROR, SAID = "error.txt", "stderr.txt"
PR_SET_PDEATHSIG = 1


def run(
    student: Student, source: Path, text: Text, config: FinetuneConfig, seed: int, folder: Path, device: torch.device
) -> dict[str, list[float]]:
    """As `training.train`, in as many processes as config says. source: the checkpoint that the student was built of."""
    count = how_many(config, device)
    _same(folder, {"processes": count, "device": device.type})
    if count == 1:
        return train(student, text, config, seed, folder, device, progress.bar(f"training {source.name}"))
    last(folder, count)  # what an interruption left in pieces goes before the processes look
    (folder / ERROR).unlink(missing_ok=True)
    store.save_tensors(folder / TEXT, text._asdict())
    job = {"source": str(source), "config": asdict(config), "seed": seed, "device": device.type}
    store.save_json(folder / JOB, job)
    _launch(folder, count)
    student.load_state_dict(store.load_tensors(folder / LEARNED))
    return store.load_json(folder / CURVES)


def how_many(config: FinetuneConfig, device: torch.device) -> int:
    return config.processes or (torch.cuda.device_count() if device.type == "cuda" else 1)


def _same(folder: Path, way: dict[str, Any]) -> None:
    """What other numbers of processes have begun is begun anew: it would not end alike."""
    file = folder / "way.json"
    if file.exists() and store.load_json(file) != way:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    store.save_json(file, way)


def _die_with_parent() -> None:
    """In torchrun, which hands the signal on: a stage that is killed leaves nobody behind who writes into its folder."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _launch(folder: Path, count: int) -> None:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count))}
    command = [sys.executable, *run, "-m", "tasks.processes", str(folder)]
    with (folder / SAID).open("w") as said:  # torchrun's own account of what a sentence explains is not for everybody
        environment = dict(os.environ) | threads
        started = subprocess.Popen(command, env=environment, stderr=said, preexec_fn=_die_with_parent)
        try:
            code = started.wait()
        except BaseException:
            started.terminate()  # which torchrun hands on
            started.wait()
            raise
    if (folder / ERROR).exists():
        raise UserError((folder / ERROR).read_text())
    if code:
        raise RuntimeError(f"torchrun ended with {code}; its processes said\n{(folder / SAID).read_text()}")


def main(folder: Path) -> int:
    first, local = os.environ["RANK"] == "0", int(os.environ["LOCAL_RANK"])
    logging.basicConfig(format="finetune: %(message)s", level=logging.INFO if first else logging.ERROR, stream=sys.stdout)
    job, text = store.load_json(folder / JOB), Text(**store.load_tensors(folder / TEXT))
    device = torch.device("cuda", local) if job["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config, source = FinetuneConfig(**job["config"]), Path(job["source"])
    report = progress.bar(f"training {source.name}") if first else lambda done, total: None
    try:
        student = build(source, config, device)
        curves = train(student, text, config, job["seed"], folder, device, report)
    except (UserError, InputError) as e:
        (folder / ERROR).write_text(str(e))
        return 2
    if first:
        store.save_tensors(folder / LEARNED, dict(student.state_dict()))
        store.save_json(folder / CURVES, curves)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
