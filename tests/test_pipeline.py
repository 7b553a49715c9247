"""The real flow, from a clone to the comparison, on the tiny model."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from tasks import published, store
from tasks.stages import pieces
from tests.conftest import article, tiny_config, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
PIECES = pieces(["rtn-2", "gptq-2"])
pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own, when the runs are read back


def clone(folder: Path) -> Path:
    """What git holds, with a tiny model and text of the user's own."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists() and name != "dvc.lock":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(folder / "data/sources/model")
    tiny_tokenizer().save_pretrained(folder / "data/sources/model")
    rows = [f'{{"text": "{article(i)}"}}\n' for i in range(40)]
    (folder / "data/sources/text.jsonl").write_text("".join(rows))
    change(folder, prepare={"model": "path:data/sources/model", "text": "path:data/sources/text.jsonl", "window": 32,
                            "eval_window": 64, "eval_stride": 32, "calibration_windows": 8},
           sensitivity={"chunk_size": 40}, supernet={"steps": 4, "tokens": 16},
           allocate={"target_bits": 2.75, "embedding_bits": 8, "allocator": "ppo", "windows": 2, "episodes": 6, "batch": 3,
                     "losses": 2, "curriculum": [3.0]},
           quantize={"export_dequantized": True}, finetune={"steps": 4, "save_every": 2},
           diagnose={"probes": 1, "steps": 3, "windows": 1, "tokens": 32},
           benchmark={"windows": 4, "limit": 4, "completions": 2, "completion_tokens": 4},
           baselines={"methods": ["rtn", "gptq"], "group": 32, "at_once": 2})  # fmt: skip
    return folder


def change(folder: Path, **sections: dict) -> None:
    yaml = YAML()
    data = yaml.load((folder / "params.yaml").read_text())
    for name, values in sections.items():
        data[name].update(values)
    yaml.dump(data, folder / "params.yaml")


def environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "MLFLOW", "DVC", "WINDQUANT"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return clean | {"OMP_NUM_THREADS": "1", "PATH": path}


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = clone(tmp_path_factory.mktemp("project"))
    done = run(folder, "flows.run")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (
        "MLflow UI",
        "Prefect UI",
        "| reference",
        "| uniform",
        "| lagrangian",
        "| ppo",
        "| ppo-trained",
        "| rtn-2",
        "| gptq-2",
    ):
        assert name in done.stdout
    return folder


def test_every_stage_left_its_artifacts_and_the_plan_keeps_its_budget(project, monkeypatch):
    monkeypatch.chdir(project)
    for piece in PIECES:
        assert store.path(piece.key).is_dir() and "mlflow_run" in store.load_json(store.run_record(piece.key))
    metrics = store.load_json(store.path("compare") / "metrics.json")
    assert 0.97 * 2.75 < metrics["effective_bits"] <= 2.75
    assert {p.name for p in store.path("compare").glob("*.png")} == {"pareto.png", "allocation.png", "widths.png"}


def test_a_checkpoint_has_its_card_its_tokenizer_and_its_dense_copy(project):
    folder = project / "artifacts/quantize/ppo"
    assert "base model" in (folder / "README.md").read_text()
    assert (folder / "tokenizer.json").exists() and (folder / "bf16/model.safetensors").exists()


def test_mlflow_holds_one_pipeline_run_with_a_nested_run_a_stage(project, monkeypatch):
    monkeypatch.setenv("DVC_ROOT", str(project))
    from tasks import tracking

    api, experiment = tracking.client()
    runs = {r.info.run_name: r for r in api.search_runs([experiment])}
    parent = runs["pipeline ppo 2.75"]
    assert parent.info.status == "FINISHED"
    assert {"effective_bits", "target_bits", "model_bytes", "perplexity", "kl_to_reference", "acc/last_word", "acc_mean",
            "gpu_hours", "cpu_hours", "wall_seconds", "peak_rss_gib", "bits_share/2", "bytes/codes"} <= parent.data.metrics.keys()  # fmt: skip
    for piece in PIECES:
        assert runs[piece.name].data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert runs[piece.name].info.status == "FINISHED" and parent.data.tags[f"state/{piece.name}"] == "Executed"
    assert runs["baselines-gptq-2"].data.metrics["perplexity"] > 0
    assert {n for n, r in runs.items() if r.data.tags["kind"] == "published"} == {row.name for row in published.ROWS}


def test_a_second_run_does_no_work_and_says_so(project):
    before = {p: (project / store.run_record(p.key)).read_text() for p in PIECES}
    done = run(project, "flows.run")
    assert done.returncode == 0 and "nothing changed: all 12 stages are up to date" in done.stdout + done.stderr
    assert before == {p: (project / store.run_record(p.key)).read_text() for p in PIECES}


def test_bad_input_ends_in_a_sentence_and_leaves_everything(project):
    before = store.hash_tree(project / "artifacts/allocate")
    original = (project / "params.yaml").read_text()
    change(project, allocate={"target_bits": 1.05})
    done = run(project, "flows.run")
    (project / "params.yaml").write_text(original)
    assert done.returncode == 2
    assert "allocate.target_bits 1.05 is out of reach for this model: target_bits can be" in done.stderr
    assert "Traceback" not in done.stderr
    assert store.hash_tree(project / "artifacts/allocate") == before
    assert "didn't change" in run(project, "dvc", "repro", "allocate").stdout


def test_two_clones_give_the_same_plan_hash_for_hash(project, tmp_path):
    """The second without Prefect: `dvc repro` makes the same artifacts."""
    other = clone(tmp_path)
    done = run(other, "dvc", "repro", "allocate")
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in ("prepare", "calibrate", "sensitivity", "supernet", "allocate"):
        assert store.hash_tree(other / store.path(stage)) == store.hash_tree(project / store.path(stage)), stage


def test_ctrl_c_on_a_terminal_ends_the_run_and_leaves_everything(project):
    """The signal goes to every process of the terminal's foreground group at once."""
    before = store.hash_tree(project / "artifacts/quantize")
    original = (project / "params.yaml").read_text()
    change(project, allocate={"target_bits": 2.9})
    command = [sys.executable, "-m", "flows.run"]
    flow = subprocess.Popen(command, cwd=project, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, start_new_session=True)  # fmt: skip
    assert flow.stdout is not None
    for line in flow.stdout:
        if "python -m tasks quantize" in line:
            os.killpg(flow.pid, signal.SIGINT)
            break
    rest, _ = flow.communicate(timeout=90)
    (project / "params.yaml").write_text(original)
    assert flow.returncode == 130 and "interrupted; run again to go on from there" in rest
    assert "Traceback" not in rest
    assert store.hash_tree(project / "artifacts/quantize") == before
