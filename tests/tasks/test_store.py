import os

import pytest
import torch

from tasks import plans, store
from tasks.errors import UserError
from windquant.features import FEATURES
from windquant.salient import Protection
from windquant.units import Matrix, cut, sizes


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


BODY = cut([Matrix("layers.0.q_proj", 0, 8, 40), Matrix("layers.1.up_proj", 1, 4, 32)], 16)
UNPROTECTED = {"salient": "none", "salient_share": 0.03}
HEADER = UNPROTECTED | {"model_hash": "abc", "chunk_size": 16}
PLAN_HEADER = HEADER | {"target_bits": 16.0, "allocator": "uniform", "seed": 0, "other_bytes": 100, "embedding_bits": None}


def test_resume_state_survives_the_same_fingerprint():
    first = store.Scratch("calibrate", "abc")
    first.put("a", {"x": torch.arange(3)})
    first.put_json("b", {"y": 1})
    again = store.Scratch("calibrate", "abc")
    assert again.resumed and torch.equal(again.get("a")["x"], torch.arange(3)) and again.get_json("b") == {"y": 1}


def test_resume_state_of_other_params_or_data_is_never_used():
    store.Scratch("calibrate", "abc").put("a", {"x": torch.arange(3)})
    other = store.Scratch("calibrate", "xyz")
    assert not other.resumed and not other.has("a")


def test_time_of_interrupted_starts_counts_as_far_as_their_work_is_kept(monkeypatch):
    def at(now: float) -> None:
        monkeypatch.setattr(store.time, "time", lambda: now)

    def wrote(scratch: store.Scratch, when: float) -> None:
        scratch.put_json("block", {})
        os.utime(scratch.folder / "block.json", (when, when))

    first = store.Scratch("quantize", "abc")
    for file in first.folder.iterdir():
        os.utime(file, (1000, 1000))
    at(1000)
    with pytest.raises(KeyboardInterrupt), first.clock("a"):
        wrote(first, 1060)
        at(1090)
        raise KeyboardInterrupt
    at(5000)
    with store.Scratch("quantize", "abc").clock("a") as clock:
        at(5005)
        assert clock.seconds == 65
    at(9000)
    assert clock.seconds == 65
    with store.Scratch("quantize", "abc").clock("a") as again:
        at(9001)
    assert again.seconds == 61
    with store.Scratch("quantize", "xyz").clock("a") as other:
        at(9003)
    assert other.seconds == 2


def test_a_plan_comes_back_as_it_was_saved():
    plan = plans.Plan(BODY, [2, 1.58, 16, 3, 1], PLAN_HEADER, [7, 0, 3, 0, 1])
    plans.save_plan(store.Path("plan.parquet"), plan, [0.1] * 5)
    assert plans.load_plan(store.Path("plan.parquet")) == plan


def test_the_same_plan_is_the_same_file():
    for name in ("a", "b"):
        plans.save_plan(store.Path(name), plans.Plan(BODY, [2.0] * 5, {"seed": 0}, [0] * 5), [0.1] * 5)
    assert store.hash_file(store.Path("a")) == store.hash_file(store.Path("b"))


def test_the_table_comes_back_as_it_was_saved():
    D, features = torch.rand(5, 7, dtype=torch.float64), torch.rand(5, len(FEATURES), dtype=torch.float64)
    table = plans.Table(BODY, D, sizes(BODY), HEADER | {"other_bytes": {"null": 100}}, [7, 0, 3, 0, 1], features)
    plans.save_distortions(store.Path("t.parquet"), table)
    found = plans.load_distortions(store.Path("t.parquet"))
    assert found.body == BODY and torch.equal(found.D, table.D) and torch.equal(found.B, table.B)
    assert found.salient == table.salient and torch.equal(found.features, features)


def test_a_width_that_does_not_exist_is_refused():
    changed_plan(columns={"bits": [5.0] * 5})
    with pytest.raises(UserError, match="is not a plan: its column `bits` must hold only 1, 1.58, 2"):
        plans.load_plan(store.Path("plan.parquet"))


def changed_plan(columns=None, header=None, rows=None):
    """A plan's file, somebody's hand in it. rows: the order of its rows."""
    plans.save_plan(store.Path("plan.parquet"), plans.Plan(BODY, [2, 1.58, 16, 3, 1], PLAN_HEADER, [0] * 5), [0.1] * 5)
    found, old = store.load_table(store.Path("plan.parquet"))
    found = {name: [values[i] for i in rows or range(5)] for name, values in found.items()} | (columns or {})
    store.save_table(store.Path("plan.parquet"), found, {k: v for k, v in (old | (header or {})).items() if v != "gone"})


@pytest.mark.parametrize("rows", [[1, 0, 2, 3, 4], [1, 2, 3, 4], [0, 3, 1, 2, 4], [0, 2, 3, 4]])
def test_rows_in_another_order_or_missing_are_refused(rows):
    """They would give widths to other columns than the allocator meant."""
    changed_plan(rows=rows)
    with pytest.raises(UserError, match="its rows are not all units of every matrix, from left to right"):
        plans.load_plan(store.Path("plan.parquet"))


@pytest.mark.parametrize(("columns", "says"), [
    ({"bits": [4, 1.58, 16, 3, 1]}, "column `bytes` is not what its widths take"),
    ({"bits": [True] * 5}, "is not a plan"),
    ({"bits": [[2]] * 5}, "is not a plan"),
    ({"rows": ["8"] * 5}, "column `rows` must hold int alone"),
    ({"columns": [None] * 5}, "column `columns` must hold int alone"),
    ({"salient": [0.5] * 5}, "column `salient` must hold int alone"),
])  # fmt: skip
def test_a_plan_with_a_column_changed_is_refused(columns, says):
    changed_plan(columns=columns)
    with pytest.raises(UserError, match=says):
        plans.load_plan(store.Path("plan.parquet"))


def test_a_plan_above_its_target_is_refused():
    for target in (2.25, float("nan")):
        changed_plan(header={"target_bits": target})
        with pytest.raises(UserError, match="effective bits, above its target_bits"):
            plans.load_plan(store.Path("plan.parquet"))


@pytest.mark.parametrize("header", [b"[1]", b"null", b"{", b"\xff"])
def test_a_table_whose_header_is_no_object_is_refused(header):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"windquant": header}), "t.parquet")
    with pytest.raises(UserError, match="it has no header"):
        store.load_table(store.Path("t.parquet"))


@pytest.mark.parametrize("header", [
    {"chunk_size": "gone"}, {"chunk_size": 0}, {"chunk_size": "16"}, {"chunk_size": 8}, {"salient": "gone"}, {"salient": "foo"},
    {"salient_share": None}, {"embedding_bits": "8"}, {"model_hash": 7}, {"seed": True},
])  # fmt: skip
def test_a_damaged_header_is_refused_in_a_sentence(header):
    changed_plan(header=header)
    with pytest.raises(UserError, match="plan.parquet"):
        plans.load_plan(store.Path("plan.parquet"))


@pytest.mark.parametrize("column", ["bytes_3", "distortion_1.58", "sparsity"])
def test_a_table_that_lacks_a_column_is_refused(column):
    table = plans.Table(BODY, torch.rand(5, 7), sizes(BODY), HEADER | {"other_bytes": {}}, [0] * 5, torch.rand(5, 6))
    plans.save_distortions(store.Path("t.parquet"), table)
    columns, header = store.load_table(store.Path("t.parquet"))
    store.save_table(store.Path("t.parquet"), {k: v for k, v in columns.items() if k != column}, header)
    with pytest.raises(UserError, match=f"lacks the column {column}"):
        plans.load_distortions(store.Path("t.parquet"))


def test_a_file_that_is_no_table_is_refused():
    store.Path("plan.parquet").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"plan.parquet is damaged"):
        plans.load_plan(store.Path("plan.parquet"))


def test_plan_counts_its_bytes_and_shares():
    plan = plans.Plan(BODY, [2.0] * 5, UNPROTECTED, [0] * 5)
    assert plan.size == sum(u.size(2) for u in BODY) and plan.shares()[2] == 1.0
    assert plan.of("layers.1.up_proj") == [2, 2]


@pytest.mark.parametrize("mode", ["weights", "columns"])
def test_a_plan_counts_its_salient_weights(mode):
    header = {"salient": mode, "salient_share": 0.05}
    plan = plans.Plan(BODY, [2.0] * 5, header, [16] * 5)
    protection = Protection(mode, 0.05)
    assert plan.size == sum(u.size(2) for u in BODY) + sum(protection.size(m) for m in {u.matrix for u in BODY})


@pytest.mark.parametrize("load", [store.load_json, store.load_table, store.load_tensors])
def test_a_missing_artifact_names_the_remedy(load):
    with pytest.raises(UserError, match="artifacts/x is missing; run `dvc repro`"):
        load(store.Path("artifacts/x"))


def test_the_hash_of_a_tree_sees_names_and_contents():
    folder = store.Path("tree")
    folder.mkdir()
    (folder / "a").write_text("1")
    first = store.hash_tree(folder)
    (folder / "a").rename(folder / "b")
    second = store.hash_tree(folder)
    (folder / "b").write_text("2")
    assert len({first, second, store.hash_tree(folder)}) == 3
