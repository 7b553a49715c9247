import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tasks import expected, generate, models, shared, store
from tasks.expected import Expected
from tasks.shared import Shared
from tests.tasks.test_resume import prepared  # noqa: F401
from windquant.evaluate import log_probabilities

CPU = torch.device("cpu")
FILE = store.path("prepare") / "windows" / "validation.safetensors"
pytestmark = pytest.mark.usefixtures("prepared")


def expect(n=None):
    return Expected("validation", n, CPU)


def never(monkeypatch):
    monkeypatch.setattr(models, "reference", lambda *a: pytest.fail("the reference was read"))


def test_log_probabilities_are_the_references_computed_once_and_read_again(monkeypatch):
    model = models.reference(store.path("prepare") / "model", CPU)
    wanted = [log_probabilities(model, row) for row in store.load_tensors(FILE)["ids"].long()]
    once = expect()
    assert all(torch.equal(once(i), w) for i, w in enumerate(wanted)) and len(once.ids) == len(wanted) == 4
    never(monkeypatch)
    again = expect(1)
    assert torch.equal(again(0), wanted[0]) and len(again.ids) == 1


def other_config():
    file = store.path("prepare") / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.1}))


@pytest.mark.parametrize("change", [
    other_config, lambda: store.save_tensors(FILE, {"ids": store.load_tensors(FILE)["ids"].flip(1)}),
])  # fmt: skip
def test_another_models_or_other_texts_are_not_taken(monkeypatch, change):
    expect()(0)
    change()
    never(monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="was read"):
        expect()(0)


def test_what_takes_too_much_is_not_kept(monkeypatch):
    monkeypatch.setattr(expected, "KEPT", 1)
    expect()(0)
    assert not list(store.state("shared").rglob("*.safetensors"))


def test_a_disk_that_is_full_costs_the_time_and_not_the_stage(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    wanted = expect()(1)
    monkeypatch.setattr(Shared, "has", lambda *args: False)
    monkeypatch.setattr(Shared, "put", full)
    assert torch.equal(expect()(1), wanted)


def test_what_nobody_asked_for_in_a_day_is_deleted():
    folder = store.state("shared")
    for name, age in (("old", shared.DAY + 60), ("young", shared.DAY - 60)):
        (folder / name).mkdir(parents=True)
        then = folder.stat().st_mtime - age
        os.utime(folder / name, (then, then))
    own = Shared(CPU, [generate])
    assert sorted(f.name for f in folder.iterdir()) == sorted([own.folder.name, "young"])


def test_who_asks_at_once_waits_and_reads(monkeypatch):
    counted, wanted = [], log_probabilities

    def slow(model, ids):
        counted.append(1)
        time.sleep(0.5)
        return wanted(model, ids)

    monkeypatch.setattr(expected.evaluate, "log_probabilities", slow)
    asking = [expect() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda e: e(0), asking))
    assert len(counted) == 1 and torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
