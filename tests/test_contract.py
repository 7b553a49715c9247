"""What holds the six places of a stage together, and who may import whom."""

import importlib
from dataclasses import fields
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tasks import settings, store
from tasks.baselines import BaselinesConfig
from tasks.measure import BenchmarkConfig
from tasks.stages import MATRIX, STAGES, Piece
from tests.imports import closure, names

DVC = YAML(typ="safe").load(Path("dvc.yaml").read_text())
VARIANT = "${item.method}-${item.bits}"
SOURCES = [f for package in ("windquant", "tasks", "flows", "benchmarks") for f in Path(package).rglob("*.py")]


def test_stages_have_one_name_in_six_places():
    assert tuple(DVC["stages"]) == STAGES
    assert tuple(f.name for f in fields(settings.Params)) == ("common", *STAGES) == tuple(settings.SECTIONS)
    assert tuple(YAML(typ="safe").load(Path("params.yaml").read_text())) == ("common", *STAGES)
    for stage in STAGES:
        variant = f" {VARIANT}" if stage == MATRIX else ""
        assert DVC["stages"][stage]["cmd"] == f"python -m tasks {stage}{variant}"
        assert callable(importlib.import_module(f"tasks.{stage}").run)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_tracks_its_own_section_and_its_own_outputs(stage):
    key = Piece(stage, VARIANT if stage == MATRIX else "").key
    assert DVC["stages"][stage]["outs"] == [str(store.path(key)), str(store.run_record(key))]
    if stage != MATRIX:
        others = ["baselines"] if stage == "compare" else []  # which rows belong together
        assert DVC["stages"][stage]["params"] == ["common", stage, *others]


def test_a_variant_tracks_what_it_is_made_and_measured_with_but_not_the_lists_of_variants():
    """Else one more method, or more at once, would make all others again. Completions are benchmark's own."""
    lists = {"methods", "bits", "at_once"}
    assert DVC["stages"][MATRIX]["matrix"] == {"method": "${baselines.methods}", "bits": "${baselines.bits}"}
    own = {f"baselines.{f.name}" for f in fields(BaselinesConfig) if f.name not in lists}
    shared = {f"benchmark.{f.name}" for f in fields(BenchmarkConfig) if not f.name.startswith("completion")}
    assert set(DVC["stages"][MATRIX]["params"]) == {"common"} | own | shared


@pytest.mark.parametrize("stage", STAGES)
def test_deps_cover_every_module_a_stage_imports(stage):
    """Else an edit to the library would not run the stage again."""
    code = {Path(d) for d in DVC["stages"][stage]["deps"] if d.endswith(".py")}
    assert code == closure(Path(f"tasks/{stage}.py"))


@pytest.mark.parametrize("stage", STAGES)
def test_other_deps_are_outputs_of_earlier_stages_or_the_users_folders(stage):
    earlier = STAGES[: STAGES.index(stage)]
    outs = [str(p) for s in earlier for p in (store.path(s), store.run_record(s))] + ["artifacts/runs/baselines"]
    for dep in (d for d in DVC["stages"][stage]["deps"] if not d.endswith(".py")):
        assert dep in ("data/sources", "data/tasks") or any(dep == o or dep.startswith(f"{o}/") for o in outs), dep


def test_params_yaml_names_every_parameter_and_gives_the_defaults():
    """The file is the manual: nothing hidden, nothing stale."""
    data = YAML(typ="safe").load(Path("params.yaml").read_text())
    for name, cls in settings.SECTIONS.items():
        assert sorted(data[name]) == sorted(f.name for f in fields(cls)), name
    given = {"prepare": {"model", "text"}}
    for name, cls in settings.SECTIONS.items():
        default = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(cls()).items()}
        assert {k for k, v in data[name].items() if default[k] != v} == given.get(name, set()), name


@pytest.mark.parametrize("file", SOURCES, ids=str)
def test_imports_run_from_flows_to_tasks_to_windquant(file):
    layers = ["windquant", "tasks", "flows", "benchmarks"]
    allowed = {"windquant": {"windquant"}, "tasks": {"tasks", "windquant"}, "flows": {"flows", "tasks", "windquant"},
               "benchmarks": set(layers) - {"flows"}}[file.parts[0]]  # fmt: skip
    assert {n.split(".")[0] for n in names(file)} & set(layers) <= allowed


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("mlflow", {"tasks/tracking.py"}),
        ("lm_eval", {"tasks/harness.py"}),
        ("auto_round", {"tasks/signround.py"}),
        ("prefect", {"tasks/stage.py", "flows/pipeline.py"}),
        (
            "transformers",
            {"benchmarks/winq.py", "tasks/models.py", "tasks/prepare.py", "tasks/training.py", "windquant/plugin.py"},
        ),
    ],
)
def test_each_library_has_its_home(library, homes):
    assert {str(f) for f in SOURCES if library in {n.split(".")[0] for n in names(f)}} == homes


@pytest.mark.parametrize("file", [f for f in SOURCES if f.parts[0] == "windquant"], ids=str)
def test_the_library_needs_torch_and_little_else(file):
    import sys

    found = {n.split(".")[0] for n in names(file)} - {"windquant", "torch"} - set(sys.stdlib_module_names)
    homes = {"checkpoint.py": {"safetensors"}, "plugin.py": {"transformers"}, "environment.py": {"gymnasium"}}
    assert found <= homes.get(file.name, set())
