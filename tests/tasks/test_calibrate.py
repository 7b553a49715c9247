import logging
from pathlib import Path

import pytest
import torch

from tasks import store
from tasks.calibrate import CalibrateConfig, run
from tasks.config import Common
from tasks.job import Job
from tests.conftest import architecture, taken_apart


@pytest.fixture
def calibrated(tmp_path, monkeypatch, caplog):
    """A function: a model -> what the stage records of it, and its log."""
    monkeypatch.chdir(tmp_path)

    def make(model):
        folder = store.path("prepare")
        model.config.save_pretrained(folder / "model")
        store.save_tensors(folder / "model/model.safetensors", {k: p.data for k, p in model.named_parameters()})
        store.save_tensors(folder / "windows/calibration.safetensors", {"ids": torch.arange(1, 13)[None]})
        with caplog.at_level(logging.INFO, logger="windquant"):
            return run(CalibrateConfig(), Job("calibrate", Common(), Path("out"), store.Scratch("calibrate", "x")))

    return make


def test_experts_without_tokens_are_reported(calibrated, caplog):
    """Two opposite router rows: for every token one of them is above zero, where all others are."""
    model = taken_apart(architecture("qwen3_moe", num_experts_per_tok=1))
    for block in model.model.layers:
        block.mlp.gate.weight[2:] = 0
        block.mlp.gate.weight[1] = -block.mlp.gate.weight[0].normal_()
    record = calibrated(model)
    assert record.metrics == {"experts": 16, "experts_without_tokens": 12}
    assert "experts without calibration tokens: 12 of 16 (model.layers.0.mlp.experts.2, model.layers.0" in caplog.text


def test_models_without_experts_report_none(calibrated, tiny, caplog):
    assert calibrated(tiny).metrics == {} and "experts" not in caplog.text
