import pytest
import torch

from tasks import expected, models, store
from tasks.expected import Expected
from tests.tasks.test_resume import prepared  # noqa: F401
from windquant.evaluate import log_probabilities

CPU = torch.device("cpu")


@pytest.fixture
def ids(prepared):  # noqa: F811
    return store.load_tensors(store.path("prepare") / "windows" / "validation.safetensors")["ids"].long()


def never(monkeypatch):
    monkeypatch.setattr(models, "reference", lambda *a: pytest.fail("the reference was read"))


def test_log_probabilities_are_the_references_computed_and_read_again(ids, monkeypatch):
    model = models.reference(store.path("prepare") / "model", CPU)
    wanted = [log_probabilities(model, row) for row in ids]
    once = Expected("validation", ids, CPU)
    assert all(torch.equal(once(i), w) for i, w in enumerate(wanted))
    never(monkeypatch)
    again = Expected("validation", ids[:1], CPU)
    assert torch.equal(again(0), wanted[0])


def test_those_of_another_reference_or_other_windows_are_not_taken(ids, monkeypatch):
    Expected("validation", ids, CPU)(0)
    never(monkeypatch)
    file = store.path("prepare") / "manifest.json"
    manifest = store.load_json(file)
    for name in ("model_hash", "windows_hash"):
        store.save_json(file, manifest | {name: "another"})
        with pytest.raises(pytest.fail.Exception, match="was read"):
            Expected("validation", ids, CPU)(0)


def test_what_takes_too_much_of_the_disk_is_not_kept(ids, monkeypatch):
    monkeypatch.setattr(expected, "KEPT", 1)
    Expected("validation", ids, CPU)(0)
    assert not list(store.state("expected").rglob("*.safetensors"))
