import pytest
import torch

from tasks import plans, store
from tasks.errors import UserError
from windquant.salient import Protection
from windquant.units import Matrix, cut, sizes


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


BODY = cut([Matrix("layers.0.q_proj", 0, 8, 40), Matrix("layers.1.up_proj", 1, 4, 32)], 16)
UNPROTECTED = {"salient": "none", "salient_share": 0.03}


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


def test_a_plan_comes_back_as_it_was_saved():
    plan = plans.Plan(BODY, [2, 1.58, 16, 3, 1], {"target_bits": 2.25, "chunk_size": 16}, [7, 0, 3, 0, 1])
    plans.save_plan(store.Path("plan.parquet"), plan, [0.1] * 5)
    assert plans.load_plan(store.Path("plan.parquet")) == plan


def test_the_same_plan_is_the_same_file():
    for name in ("a", "b"):
        plans.save_plan(store.Path(name), plans.Plan(BODY, [2.0] * 5, {"seed": 0}, [0] * 5), [0.1] * 5)
    assert store.hash_file(store.Path("a")) == store.hash_file(store.Path("b"))


def test_the_table_comes_back_as_it_was_saved():
    table = plans.Table(BODY, torch.rand(5, 7, dtype=torch.float64), sizes(BODY), {"chunk_size": 16}, [7, 0, 3, 0, 1])
    plans.save_distortions(store.Path("t.parquet"), table)
    found = plans.load_distortions(store.Path("t.parquet"))
    assert found.body == BODY and torch.equal(found.D, table.D) and torch.equal(found.B, table.B)
    assert found.salient == table.salient


def test_a_width_that_does_not_exist_is_refused():
    plan = plans.Plan(BODY, [2.0] * 5, UNPROTECTED, [0] * 5)
    plans.save_plan(store.Path("plan.parquet"), plan, [0.1] * 5)
    columns, header = store.load_table(store.Path("plan.parquet"))
    store.save_table(store.Path("plan.parquet"), columns | {"bits": [5.0] * 5}, header)
    with pytest.raises(UserError, match="is not a plan: its column `bits` must hold only 1, 1.58, 2"):
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
